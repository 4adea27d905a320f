"""The same pipeline of two ranks twice: Piper's, and that of ``torch.distributed.pipelining``'s
class for the same schedule.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from benchmarks.links import Link
from benchmarks.processes import OneOf
from benchmarks.stages import Stage
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from piper import strategies
from piper.api.programs import Program, Programs, model_tensors
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.runtime.batch import Batch
from piper.runtime.optimizer import OptimizerSpec, ParamsArgument
from piper.runtime.slices import Slice

CONFIG = Path(__file__).parent.parent / "examples" / "gpt_stdlib.toml"
"""The model and the sequence length."""

RANKS = 2
MICROBATCHES = 8
ROWS = 4


class Kind(msgspec.Struct, frozen=True):
    """A schedule: Piper's name of it, torch's class, and the stages that each rank holds."""

    piper: str
    theirs: Callable[..., Any]
    stages: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def per_rank(self) -> int:
        return len(self.stages[0])


_LOOPED = ((0, 2), (1, 3))
_V = ((0, 3), (1, 2))
KINDS = {
    "1f1b": Kind("1f1b", Schedule1F1B, ((0,), (1,))),
    "interleaved": Kind("interleaved_1f1b", ScheduleInterleaved1F1B, _LOOPED),
    "zbv": Kind("zbv", ScheduleZBVZeroBubble, _V),
    "dualpipev": Kind("dualpipev", ScheduleDualPipeV, _V),
}


class Setup(msgspec.Struct, frozen=True):
    """What the processes are told. They meet on ``port`` of the first one."""

    link: Link
    port: int
    schedules: tuple[str, ...]
    rounds: int
    steps: int
    seq_len: int
    width: int
    layers: int
    heads: int
    profile: str = ""


class Side(Protocol):
    """One rank of a pipeline that trains. ``gradients`` are those of its last step by the model's
    names, while ``watched``.
    """

    watched: bool
    gradients: dict[str, torch.Tensor]

    def run(self, first: int, count: int) -> list[float]:
        """Training steps first, first + 1, …; the microbatch losses, on the rank of the last
        stage.
        """


def build_model(setup: Setup, kind: Kind) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        TransformerConfig(
            context=setup.seq_len,
            width=setup.width,
            num_layers=setup.layers,
            num_heads=setup.heads,
            num_stages=RANKS * kind.per_rank,
        )
    )


def build_optimizer(parameters: ParamsArgument) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=5e-4, betas=(0.9, 0.99), weight_decay=0.1)


def batch_of(step: int, setup: Setup) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (MICROBATCHES * ROWS, setup.seq_len + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class PiperSide:
    """A :class:`~piper.runtime.worker.Worker`, as under Ray."""

    def __init__(self, name: str, rank: int, setup: Setup, store: Store) -> None:
        kind = KINDS[name]
        model = build_model(setup, kind)
        strategy = strategies.pipeline(
            kind.piper, [[0], [1]], MICROBATCHES, num_virtual_stages=kind.per_rank
        )
        self.program: Program = Programs(model, transformer_loss, strategy).training(
            batch_of(0, setup)
        )
        self.watched, self.gradients = False, {}
        self._setup = setup
        host = setup.link.addresses[rank]
        self._backend = OneOf(rank, RANKS, PrefixStore(name, store), host)
        self._backend.start(RANKS)
        program = self.program
        self._backend.load("train", program.plan, program.signature, program.constants)
        self.optimizer = OptimizerSpec(build_optimizer)
        # Only the steps that are compared are shown: what is timed does not pay for it.
        self._load_weights(model, OptimizerSpec(build_optimizer, observe=self._observe))

    def _load_weights(self, model: Transformer, optimizer: OptimizerSpec) -> None:
        self._backend.initialise("train", model_tensors(model), optimizer)

    def _observe(self, gradients: Mapping[str, torch.Tensor], _slices: Mapping[str, Slice]) -> None:
        if self.watched:
            self.gradients |= {name: found.clone() for name, found in gradients.items()}

    def run(self, first: int, count: int) -> list[float]:
        """See :class:`Side`."""
        # A function of the step, as `trainer.fit` passes it on: before each step the workers agree
        # to run it.
        data = partial(batch_of, setup=self._setup)
        done = self._backend.run("train", data, first_step=first, num_steps=count)
        losses = (step.values.get("loss", {}) for step in done.steps)
        return [of[microbatch] for of in losses for microbatch in sorted(of)]


class TorchSide:
    """Stages cut by hand, and torch's schedule."""

    def __init__(self, name: str, rank: int, setup: Setup) -> None:
        kind = KINDS[name]
        number, device = RANKS * kind.per_rank, torch.device("cpu")
        self._own = [Stage(build_model(setup, kind), i, number) for i in kind.stages[rank]]
        made = [
            PipelineStage(stage, i, number, device)
            for i, stage in zip(kind.stages[rank], self._own, strict=True)
        ]
        stages = made[0] if kind.per_rank == 1 else made
        self._schedule = kind.theirs(stages, MICROBATCHES, loss_fn=transformer_loss)
        self._is_first, self._is_last = 0 in kind.stages[rank], number - 1 in kind.stages[rank]
        parameters: list[torch.Tensor] = [p for stage in self._own for p in stage.parameters()]
        self._optimizer = build_optimizer(parameters)
        self._setup = setup
        self.watched, self.gradients = False, {}

    def run(self, first: int, count: int) -> list[float]:
        """See :class:`Side`."""
        found: list[float] = []
        for step in range(first, first + count):
            inputs, targets = batch_of(step, self._setup)
            losses: list[torch.Tensor] = []
            given = (inputs,) if self._is_first else ()
            wanted = {"target": targets, "losses": losses} if self._is_last else {}
            self._schedule.step(*given, **wanted, return_outputs=False)
            if self.watched:
                self._remember()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            found += [loss.item() for loss in losses]
        return found

    def _remember(self) -> None:
        for stage in self._own:
            for name, parameter in stage.named_parameters():
                assert parameter.grad is not None, f"{stage.names[name]} has no gradient"
                self.gradients[stage.names[name]] = parameter.grad.clone()


def check_equal(name: str, ours: Side, theirs: Side, tolerance: float = 1e-4) -> float:
    """Run step 0 on both sides; the largest error of a gradient, relative to its norm (in float32).

    Raises :class:`AssertionError` if losses or gradients disagree, or one side has a gradient that
    the other does not.
    """
    ours.watched = theirs.watched = True
    expected = theirs.run(0, 1)
    torch.testing.assert_close(ours.run(0, 1), expected, rtol=1e-5, atol=0.0)
    ours.watched = theirs.watched = False
    assert ours.gradients.keys() == theirs.gradients.keys(), (
        f"{name}: gradients of different parameters: {ours.gradients.keys() ^ theirs.gradients.keys()}"
    )
    norms = {key: of.norm().item() for key, of in theirs.gradients.items()}
    largest = max(norms.values())
    errors = {
        key: (ours.gradients[key] - of).norm().item() / max(norms[key], 1e-6 * largest)
        for key, of in theirs.gradients.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, f"{name}: gradients of {worst} differ by {errors[worst]:.1e}"
    ours.gradients, theirs.gradients = {}, {}
    return errors[worst]
