"""The mixture-of-experts decoder under ``torch.distributed.pipelining``, with all-to-alls of the
model's own.

Torch's schedules know nothing of them. ``ScheduleDualPipeV`` names the pairs of a forward and a
backward that may overlap (action ``OVERLAP_F_B``), and runs them one after the other, unless a
function of the user's says how to. Here that is two threads, one for the forward, one for the
backward; one of them computes, and hands over while it waits for an all-to-all (as torchtitan's
example does by hooks).
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.mixtures import SHARING, FirstStep, Sizes, batch_of, build_model, build_optimizer
from torch.autograd.function import Function
from torch.distributed import _functional_collectives as functional
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV
from torch.distributed.pipelining.schedules import OVERLAP_F_B, _wait_batch_p2p

from piper.models import MoE, moe_loss
from piper.models.moe import Experts
from piper.runtime.slices import Slice


class Turns:
    """Which of two threads computes. Outside of :meth:`sharing` there is one thread, and nothing to
    hand over.
    """

    def __init__(self) -> None:
        self._lock, self._shared = threading.Lock(), False

    @contextmanager
    def sharing(self) -> Iterator[None]:
        self._shared = True
        try:
            yield
        finally:
            self._shared = False

    def run(self, function: Callable[[], None]) -> None:
        with self._lock:
            function()

    def wait(self, work: dist.Work) -> None:
        """Let the other thread compute meanwhile."""
        if not self._shared:
            work.wait()
            return
        self._lock.release()
        try:
            work.wait()
        finally:
            self._lock.acquire()


class _Exchange(Function):
    """An equal all-to-all of dimension 0, and that of its gradient. Forwards and backwards have
    groups of their own: which of two threads comes first may differ between members.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (what torch passes)
        x: torch.Tensor,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        turns: Turns,
    ) -> torch.Tensor:
        ctx.groups, ctx.turns = groups, turns
        return _exchanged(x, groups[0], turns)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        return _exchanged(gradient.contiguous(), ctx.groups[1], ctx.turns), None, None


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup, turns: Turns) -> torch.Tensor:
    out = torch.empty_like(x)
    work = dist.all_to_all_single(out, x, group=group, async_op=True)
    assert work is not None
    turns.wait(work)
    return out


Exchanged = Callable[[torch.Tensor], torch.Tensor]


class SharedExperts(torch.nn.Module):
    """Part *index* of *experts*; tokens ``[E, C, width]`` are exchanged before and after."""

    def __init__(self, experts: Experts, index: int, exchange: Exchanged) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(experts.up.detach().chunk(SHARING)[index].clone())
        self.down = torch.nn.Parameter(experts.down.detach().chunk(SHARING)[index].clone())
        self._exchange = exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts, capacity, width = x.shape
        mine = experts // SHARING
        arrived = self._exchange(x.contiguous()).view(SHARING, mine, capacity, width)
        tokens = arrived.transpose(0, 1).reshape(mine, SHARING * capacity, width)
        gate, up = torch.bmm(tokens, self.up).chunk(2, dim=-1)
        out = torch.bmm(torch.nn.functional.silu(gate) * up, self.down)
        sorted_out = out.view(mine, SHARING, capacity, width).transpose(0, 1).contiguous()
        return self._exchange(sorted_out.view(experts, capacity, width))


class MoEStage(torch.nn.Module):
    """Stage *stage* of *model*, which is taken apart; ``names`` has the model's name of each of the
    stage's parameters.
    """

    def __init__(self, model: MoE, stage: int) -> None:
        super().__init__()
        known = {id(parameter): name for name, parameter in model.named_parameters()}
        last = len(model.stages) - 1
        self.embedding = model.embedding if stage == 0 else None
        self.blocks = torch.nn.ModuleList(model.blocks[i] for i in model.stages[stage])
        self.norm = model.norm if stage == last else None
        self.head = model.head if stage == last else None
        self.names = {name: known[id(parameter)] for name, parameter in self.named_parameters()}

    def forward(
        self, x: torch.Tensor, auxiliary: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.embedding is not None:
            x = self.embedding(x)
        if auxiliary is None:
            auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, auxiliary = block(x, auxiliary)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x, auxiliary


class Groups:
    """The process groups of a rank: its pipeline, and those that share its experts, for forwards
    and for backwards.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        pipelines = [
            dist.new_group([SHARING * r + i for r in range(ranks)]) for i in range(SHARING)
        ]
        self.pipeline = pipelines[rank % SHARING]
        sharing = [
            tuple(dist.new_group([SHARING * r, SHARING * r + 1]) for _ in range(2))
            for r in range(ranks)
        ]
        self.forwards, self.backwards = sharing[rank // SHARING]


class TorchPipeline:
    """One rank that trains; ``first`` is what it saw of its first step.

    *overlapped*: pairs of a forward and a backward share the rank as described above, and the
    all-to-all is :class:`_Exchange`; else it is
    ``torch.distributed._functional_collectives.all_to_all_single_autograd``, which waits at once.
    """

    def __init__(
        self,
        kind: str,
        rank: int,
        ranks: int,
        sizes: Sizes,
        groups: Groups,
        *,
        overlapped: bool = False,
    ) -> None:
        position, self._index = divmod(rank, SHARING)
        per_rank = 2 if kind == "dualpipev" else 1
        number = per_rank * ranks
        held = [position, number - 1 - position][:per_rank]
        self._turns, self._groups, self._sizes = Turns(), groups, sizes
        exchange = self._overlapping if overlapped else self._waiting
        self._stages = [MoEStage(self._model(sizes, number, exchange), stage) for stage in held]
        made = [
            PipelineStage(stage, i, number, torch.device("cpu"), group=groups.pipeline)
            for i, stage in zip(held, self._stages, strict=True)
        ]
        if kind == "dualpipev":
            schedule: Any = ScheduleDualPipeV(made, sizes.microbatches, loss_fn=moe_loss)
        else:
            schedule = Schedule1F1B(made[0], sizes.microbatches, loss_fn=moe_loss)
        self._schedule = schedule
        self._threads = ThreadPoolExecutor(1) if overlapped else None
        if overlapped:
            schedule.register_custom_function(OVERLAP_F_B, self._overlap)
        self._is_first, self._is_last = 0 in held, number - 1 in held
        parameters = [p for stage in self._stages for p in stage.parameters()]
        shared = {
            id(p)
            for s in self._stages
            for m in s.modules()
            if isinstance(m, SharedExperts)
            for p in m.parameters()
        }
        self._experts = [p for p in parameters if id(p) in shared]
        self._dense = [p for p in parameters if id(p) not in shared]
        self._optimizer = build_optimizer(list(parameters))
        self.first = FirstStep()
        losses = self._step()
        start = self._index * sizes.microbatches
        self.first.losses.update({start + m: loss.item() for m, loss in enumerate(losses)})
        self._remember()
        self._update()

    def _model(self, sizes: Sizes, stages: int, exchange: Exchanged) -> MoE:
        model = build_model(sizes, stages)
        for block in model.blocks:
            block.mlp.experts = SharedExperts(block.mlp.experts, self._index, exchange)
        return model

    def _overlapping(self, x: torch.Tensor) -> torch.Tensor:
        both = self._groups.forwards, self._groups.backwards
        out: torch.Tensor = _Exchange.apply(x, both, self._turns)
        return out

    def _waiting(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.all_to_all_single_autograd(x, None, None, self._groups.forwards)
        return functional.wait_tensor(out)

    def __call__(self) -> None:
        self._step()
        self._update()

    def _step(self) -> list[torch.Tensor]:
        """Run the schedule and average the gradients over the replicas."""
        inputs, targets = (
            part.chunk(SHARING)[self._index] for part in batch_of(self._sizes, SHARING)
        )
        losses: list[torch.Tensor] = []
        given = (inputs,) if self._is_first else ()
        wanted = {"target": targets, "losses": losses} if self._is_last else {}
        self._schedule.step(*given, **wanted, return_outputs=False)
        gradients = [p.grad for p in self._dense if p.grad is not None]
        assert len(gradients) == len(self._dense)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=self._groups.forwards)
        for gradient, total in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient)).div_(SHARING)
        for parameter in self._experts:
            # Tokens of all replicas are in it already; each replica's loss is a mean.
            assert parameter.grad is not None
            parameter.grad.div_(SHARING)
        return losses

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _remember(self) -> None:
        experts = {id(p) for p in self._experts}
        for stage in self._stages:
            for name, parameter in stage.named_parameters():
                assert parameter.grad is not None, f"{stage.names[name]} has no gradient"
                self.first.gradients[stage.names[name]] = parameter.grad.clone()
                if id(parameter) in experts:
                    self.first.slices[stage.names[name]] = Slice(experts=(self._index, SHARING))

    # --- a forward and a backward at once -----------------------------------------------------------

    def _overlap(self, action: Any, context: Any) -> None:  # noqa: ANN401 (torch's private classes)
        forward, backward = action.sub_actions
        assert self._threads is not None
        with self._turns.sharing():
            other = self._threads.submit(self._turns.run, lambda: self._backward(backward))
            self._turns.run(lambda: self._forward(forward, context))
            other.result()

    def _forward(self, action: Any, context: Any) -> None:  # noqa: ANN401
        """What torch's schedule does for an action ``FORWARD``."""
        schedule, number, m = self._schedule, action.stage_index, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}  # noqa: SLF001
        stage = stages[number]
        if not stage.is_first and number - 1 not in stages:
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((number, m)))
        output = stage.forward_one_chunk(
            m, context.arg_mbs[m], context.kwarg_mbs[m], save_forward_output=False
        )
        schedule._maybe_compute_loss(stage, output, context.target_mbs, m)  # noqa: SLF001
        if number + 1 in stages:
            stages[number + 1].set_local_fwd_input(output, m)

    def _backward(self, action: Any) -> None:  # noqa: ANN401
        """What torch's schedule does for an action ``FULL_BACKWARD``."""
        schedule, number, m = self._schedule, action.stage_index, action.microbatch_index
        stages = {stage.stage_index: stage for stage in schedule._stages}  # noqa: SLF001
        stage = stages[number]
        if not stage.is_last and number + 1 not in stages:
            _wait_batch_p2p(schedule.bwd_recv_ops.pop((number, m)))
        loss = schedule._maybe_get_loss(stage, m)  # noqa: SLF001
        schedule.backward_counter[number] += 1
        last = schedule.backward_counter[number] == self._sizes.microbatches
        stage.backward_one_chunk(m, loss=loss, full_backward=True, last_backward=last)
        if number - 1 in stages:
            stages[number - 1].set_local_bwd_input(stage.get_local_bwd_output(m), m)
