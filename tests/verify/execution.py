"""Three ways to run training steps: in sequence (the reference), in process, and by an adversary.

The reference evaluates the core DAG, as captured, in one process, microbatch after microbatch; it
shares nothing with directives, planner and verifier.
"""

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace as replace_struct
from tests.verify.dags import WIDTH

from piper.backends.inprocess import InProcessBackend
from piper.devices.tensors import TensorOperations, torch_dtype
from piper.errors import PiperError
from piper.ids import BodyId, ValueId
from piper.ir.check import topological_order
from piper.ir.dag import STATE, BatchLeaf, Dag, LossKind, Role
from piper.ops.all_to_all import ExchangeCounts, ExchangeExperts, ExchangeRows
from piper.ops.base import Handle, Instruction, RandomKey, ReduceOp, shard_length
from piper.ops.compute import Call
from piper.ops.wait import Wait
from piper.plan.model import Plan, SlotInfo
from piper.runtime.batch import Batch, flatten, signature
from piper.runtime.code import chunk_function
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.slices import Slice

STEPS = 2
RATE, MOMENTUM = 0.05, 0.9
CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What a run of :data:`STEPS` steps leaves: scalars by (step, name, global microbatch); state,
    and slices of it, by (device, name).
    """

    reports: dict[tuple[int, str, int], float] = field(default_factory=dict)
    state: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    slices: dict[tuple[int, str], tuple[Slice, torch.Tensor]] = field(default_factory=dict)


class FailedError(Exception):
    """A run that crashed or hung."""


@dataclass(frozen=True)
class Training:
    """What to train: the core DAG, initial parameters and buffers, one global batch per step,
    constants that capture found, and, if it was captured, the model with its loss.
    """

    dag: Dag
    weights: Mapping[str, torch.Tensor]
    data: Sequence[Batch]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    model: torch.nn.Module | None = None
    loss: Callable[..., object] | None = None


def hand_made(dag: Dag) -> Training:
    """Random numbers for a DAG of ``dags.chain``."""
    make = torch.Generator().manual_seed(7)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=make, dtype=torch.float64) + 0.1

    weights = {name: tensor(WIDTH, WIDTH) for name in dag.parameters}
    weights |= {name: tensor(WIDTH) for name in dag.buffers}
    rows = dag.batch_size
    return Training(
        dag, weights, [(tensor(rows, WIDTH), tensor(rows, WIDTH)) for _ in range(STEPS)]
    )


class Sgd:
    """SGD with momentum, by name."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.momenta: dict[str, torch.Tensor] = {}

    def update(
        self,
        gradients: Mapping[str, torch.Tensor],
        scale: torch.Tensor | None,
        norm: torch.Tensor | float | None = None,
        max_norm: float | None = None,
    ) -> None:
        for name, gradient in gradients.items():
            g = gradient if scale is None else gradient / scale
            g = g if max_norm is None else g * min(1.0, max_norm / (float(norm) + 1e-6))
            old = self.momenta.get(name)
            self.momenta[name] = g.clone() if old is None else MOMENTUM * old + g
            self.parameters[name].sub_(RATE * self.momenta[name])


def reference(training: Training, plan: Plan) -> Outcome:
    """Run the core DAG over the microbatches of *plan* in sequence."""
    dag = training.dag
    tensors = {name: t.clone() for name, t in (training.weights | training.constants).items()}
    sgd = Sgd(tensors)
    outcome = Outcome()
    for step, batch in enumerate(training.data):
        gradients: dict[str, torch.Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        final: dict[str, torch.Tensor] = {}
        for replica in range(plan.num_replicas):
            buffers: dict[str, torch.Tensor] = {}
            for m in range(plan.num_microbatches):
                number = replica * plan.num_microbatches + m
                named = {**tensors, **buffers, **_rows(plan, batch, number)}
                found = _evaluate(dag, plan, named, RandomKey(0, step, number, ()))
                buffers = {name: found[v] for name, v in dag.buffer_updates.items()}
                outcome.reports[step, "loss", number] = found[dag.losses[0]].item()
                if dag.weights:
                    outcome.reports[step, "weight", number] = found[dag.weights[0]].item()
                    total += found[dag.weights[0]]
                for name, value in ((n, v) for n, vs in dag.contributions.items() for v in vs):
                    old = gradients.get(name)
                    gradients[name] = found[value] if old is None else old + found[value]
            final = final or buffers
        scale = total if dag.weights else None
        if dag.clip is None:
            sgd.update(gradients, scale)
        else:
            flat = torch.cat([g.reshape(-1) for g in gradients.values()])
            norm = float((flat if scale is None else flat / scale).norm(float(dag.clip.norm)))
            outcome.reports[step, "grad_norm", 0] = norm
            sgd.update(gradients, scale, norm, dag.clip.max_norm)
        tensors.update(final)
    outcome.state = {(0, name): tensor for name, tensor in tensors.items()}
    return outcome


def eager(training: Training, plan: Plan) -> Outcome:
    """The same with PyTorch alone: autograd on the model itself."""
    model, loss_fn = copy.deepcopy(training.model), training.loss
    assert model is not None
    assert loss_fn is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    pieces = plan.num_replicas * plan.num_microbatches
    outcome = Outcome()
    for step, batch in enumerate(training.data):
        total = 0.0
        optimizer.zero_grad()
        for number in range(pieces):
            inputs, targets = _cut(batch, number, pieces)
            result = loss_fn(model(*inputs if isinstance(inputs, tuple) else (inputs,)), targets)
            loss, weight = result if isinstance(result, tuple) else (result / pieces, None)
            loss.backward()
            shown = loss if weight is not None else result
            outcome.reports[step, "loss", number] = shown.item()
            if weight is not None:
                outcome.reports[step, "weight", number] = weight.item()
                total += weight.item()
        for parameter in model.parameters():
            if total and parameter.grad is not None:
                parameter.grad /= total
        optimizer.step()
    named = (*model.named_parameters(), *model.named_buffers())
    outcome.state = {(0, name): tensor.detach() for name, tensor in named}
    return outcome


def _cut(tree: object, number: int, pieces: int):
    if isinstance(tree, torch.Tensor):
        return tree.chunk(pieces)[number]
    assert isinstance(tree, tuple)
    return tuple(_cut(item, number, pieces) for item in tree)


def _rows(plan: Plan, batch: Batch, number: int) -> dict[str, torch.Tensor]:
    """The leaves of global microbatch *number*, by name."""
    leaves = flatten(batch)
    return {leaf.name: _rows_of(plan, leaf, leaves[leaf.name], number) for leaf in plan.dag.batch}


def _rows_of(plan: Plan, leaf: BatchLeaf, tensor: object, number: int) -> torch.Tensor:
    assert isinstance(tensor, torch.Tensor)
    if leaf.batch_dim is None:
        return tensor
    size = plan.microbatch_size
    return tensor.narrow(leaf.batch_dim, number * size, size)


def _evaluate(
    dag: Dag, plan: Plan, named: Mapping[str, torch.Tensor], key: RandomKey
) -> dict[ValueId, torch.Tensor]:
    found: dict[ValueId, torch.Tensor] = {}
    for value in dag.values.values():
        if value.role is Role.SEED:
            pieces = plan.num_replicas * plan.num_microbatches
            seed = 1.0 if dag.loss_kind is LossKind.WEIGHTED else 1.0 / pieces
            found[value.id] = torch.tensor(seed, dtype=torch_dtype(value.spec.dtype))
        elif value.role in (Role.PARAMETER, Role.BUFFER, Role.INPUT):
            found[value.id] = named[value.name]
    with torch.no_grad():
        for chunk in (dag.nodes[n] for n in topological_order(dag)):
            if not isinstance(chunk.work, Call):
                continue
            function = chunk_function(dag.bodies[chunk.work.body], plan.bindings, CPU)
            mine = replace_struct(key, ordinals=chunk.work.rng)
            results = function([found[v] for v in chunk.inputs], mine)
            found.update(zip(chunk.outputs, results, strict=True))
    return found


def differs(outcome: Outcome, expected: Outcome) -> str | None:
    """How *outcome* differs from the reference, in words; ``None`` if it does not."""
    if outcome.reports.keys() != expected.reports.keys():
        return f"reports {sorted(outcome.reports.keys() ^ expected.reports.keys())}"
    for key, value in expected.reports.items():
        if not abs(outcome.reports[key] - value) <= 1e-10 * abs(value):
            return f"{key}: {outcome.reports[key]} instead of {value}"
    for (device, name), tensor in outcome.state.items():
        wanted = expected.state[0, name]
        if not (tensor - wanted).abs().max() <= 1e-10 * wanted.abs().max():
            return f"{name} on device {device}"
    for (device, name), (part, tensor) in outcome.slices.items():
        wanted, scale = part.of(expected.state[0, name]), expected.state[0, name].abs().max()
        if wanted.numel() and not (tensor - wanted).abs().max() <= 1e-10 * scale:
            return f"slice {part.index} of {name} on device {device}"
    return None


# --- in process -----------------------------------------------------------------------------------


def in_process(plan: Plan, training: Training, *, timeout: float) -> Outcome:
    """Run *plan* with threads. Raises :class:`FailedError` for a crash or a hang."""
    outcome = Outcome()
    data = training.data
    with InProcessBackend(timeout=timeout, threads=1) as backend:
        try:
            backend.start(plan.num_devices)
            backend.load("step", plan, signature(data[0]), training.constants)
            optimizer = OptimizerSpec(lambda ps: torch.optim.SGD(ps, lr=RATE, momentum=MOMENTUM))
            backend.initialise("step", training.weights, optimizer)
            result = backend.run("step", data, first_step=0)
            for step in result.steps:
                for name, values in step.values.items():
                    outcome.reports |= {(step.step, name, m): v for m, v in values.items()}
            for worker in backend._workers:
                state = worker._state
                assert state is not None
                copy = state.snapshot(plan.dag.parameters, optimizer=False)
                parts = {name for name, shard in copy.shards.items() if shard.part.experts[1] > 1}
                for name, tensor in (*state.parameters.items(), *state.buffers.items()):
                    if name not in parts:
                        outcome.state[worker._rank, name] = tensor.detach().clone()
                for name, shard in copy.shards.items():
                    outcome.slices[worker._rank, name] = shard.part, shard.tensor
        except (PiperError, AssertionError, LookupError, ValueError, TypeError) as error:
            raise FailedError(f"{type(error).__name__}: {error}") from error
    return outcome


# --- the adversary --------------------------------------------------------------------------------


def padded(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The *count* slices of a tensor, filled up with zeros to equal lengths."""
    length = shard_length(tuple(tensor.shape), count)
    whole = tensor.new_zeros(length * count)
    whole[: tensor.numel()] = tensor.reshape(-1)
    return [piece.clone() for piece in whole.split(length)]


def whole(parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor of *shape* whose padded slices are *parts*."""
    return torch.cat(list(parts))[: math.prod(shape)].reshape(shape)


def part_of(info: SlotInfo) -> Slice:
    """What of a parameter a slot holds."""
    return Slice(*(info.shard or (0, 1)), experts=info.experts or (0, 1))


class _Device(TensorOperations):
    """One device of the adversary; also the runtime that instructions are bound to."""

    torch_device = CPU

    def __init__(self, adversary: "Adversary", number: int) -> None:
        plan = adversary.plan
        self.adversary = adversary
        self.mine = plan.devices[number]
        self.number = number
        self.device = self
        self.context = self
        self.seed = 0
        self.step = 0
        self.tensors = {}
        self.shards: dict[str, torch.Tensor] = {}  # padded to equal lengths
        for info in self.mine.slots:
            if info.role in (Role.PARAMETER, Role.BUFFER, Role.SHARD):
                tensor = (adversary.training.weights | adversary.training.constants)[info.name]
                tensor = part_of(info).part(tensor)
                if info.shard is None:
                    self.tensors[info.name] = tensor.clone()
                else:
                    self.shards[info.name] = padded(tensor, info.shard[1])[info.shard[0]]
        self.state = self
        self.sgd = Sgd({**self.tensors, **self.shards})
        self.slots: list[torch.Tensor | None] = [None] * len(self.mine.slots)
        for slot, info in enumerate(self.mine.slots):
            if info.role is Role.SEED:
                dtype = torch_dtype(info.message.dtype)
                self.slots[slot] = torch.full(info.message.shape, plan.seed_value, dtype=dtype)
            elif info.role in STATE:
                held = self.shards if info.role is Role.SHARD else self.tensors
                self.slots[slot] = held[info.name]
        self.program: list[tuple[Instruction, Callable[[], Handle | None] | None]] = [
            (i, None if isinstance(i, Wait) or i.rendezvous() else i.bind(self))  # type: ignore[arg-type]
            for i in self.mine.instructions
        ]

    # The runtime, state and step context that instructions see.

    def function(self, body: BodyId):
        plan = self.adversary.plan
        return chunk_function(plan.dag.bodies[body], plan.bindings, CPU)

    def update(self, gradients, scale, norm=None, max_norm=None, *, only_finite=False) -> None:
        self.sgd.update(gradients, scale, norm, max_norm)

    def write_buffer(self, name, value, replicas=1) -> None:
        self.tensors[name].copy_(value - (replicas - 1) * self.tensors[name])

    def batch_leaf(self, index, microbatch):
        plan, batch = self.adversary.plan, self.adversary.batch
        (leaf,) = (leaf for leaf in plan.dag.batch if leaf.index == index)
        return _rows_of(plan, leaf, flatten(batch)[leaf.name], microbatch)

    def to_host(self, tensors, stream):
        """When its stream gets there: what is read too early or too late is wrong."""
        return [tensor.clone() for tensor in tensors], None

    from_host = to_host

    def releaser(self, stream) -> None:
        """Nothing is done for memory."""

    def report(self, name, microbatch, value) -> None:
        self.adversary.outcome.reports[self.step, name, microbatch] = value.item()

    # Execution.

    def begin(self, step: int) -> None:
        self.step = step
        self.next = 0
        self.queues: dict[str, deque[int]] = {}
        self.happened: set[int] = set()
        self.counts: dict[str, int] = {}
        self.started: set[int] = set()


class Adversary:
    """Executes a plan on devices whose streams advance at random speeds, as unkindly as the rules
    allow.

    *lax*: a wait holds up its stream only (an accelerator); otherwise the whole device (a CPU), and
    streams still run behind the host. Communication reads its slots when it starts or when it
    completes; a buffer that is being received holds NaN until then.
    """

    def __init__(self, plan: Plan, training: Training, *, seed: int, lax: bool) -> None:
        self.plan = plan
        self.lax = lax
        self.random = random.Random(seed)
        self.training = training
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """All steps. Raises :class:`FailedError` for a crash or a deadlock."""
        try:
            with torch.no_grad():
                self.devices = [_Device(self, d) for d in range(self.plan.num_devices)]
                for step in range(len(self.training.data)):
                    self._step(step)
        except (
            PiperError,
            AssertionError,
            LookupError,
            ValueError,
            TypeError,
            RuntimeError,
            NotImplementedError,
        ) as error:
            raise FailedError(f"{type(error).__name__}: {error}") from error
        for device in self.devices:
            parts = {info.name for info in device.mine.slots if info.experts is not None}
            for name, tensor in device.tensors.items():
                if name not in parts:
                    self.outcome.state[device.number, name] = tensor.clone()
            for info in device.mine.slots:
                if info.shard is not None:
                    size = part_of(info).of(self.training.weights[info.name]).numel()
                    mine = device.shards[info.name][:size].clone()
                    self.outcome.slices[device.number, info.name] = part_of(info), mine
                elif info.experts is not None and info.name not in device.shards:
                    mine = device.tensors[info.name].clone()
                    self.outcome.slices[device.number, info.name] = part_of(info), mine
        return self.outcome

    def _step(self, step: int) -> None:
        self.batch = self.training.data[step]
        self.meetings: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self.early: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self.speeds: dict[tuple[int, str], float] = {}
        for device in self.devices:
            device.begin(step)
        while actions := self._actions():
            weights = [self._speed(device, stream) for device, stream in actions]
            device, stream = self.random.choices(actions, weights)[0]
            if stream is None:
                self._issue(self.devices[device])
            else:
                self._advance(self.devices[device], stream)
        for device in self.devices:
            if device.next < len(device.program) or any(device.queues.values()):
                raise FailedError(f"device {device.number} hangs")
            for slot, info in enumerate(device.mine.slots):
                if info.role not in STATE and device.slots[slot] is not None:
                    raise FailedError(f"device {device.number} leaks slot {slot}")

    def _speed(self, device: int, stream: str | None) -> float:
        key = (device, stream or "host")
        if key not in self.speeds:
            self.speeds[key] = 10.0 ** self.random.uniform(-3, 1)
        return self.speeds[key]

    def _actions(self) -> list[tuple[int, str | None]]:
        actions: list[tuple[int, str | None]] = []
        for device in self.devices:
            if device.next < len(device.program) and not self._host_blocked(device):
                actions.append((device.number, None))
            for stream, queue in device.queues.items():
                if queue and self._ready(device, queue[0]):
                    actions.append((device.number, stream))
        return actions

    def _host_blocked(self, device: _Device) -> bool:
        instruction, _ = device.program[device.next]
        return (
            not self.lax
            and isinstance(instruction, Wait)
            and instruction.event not in device.happened
        )

    def _issue(self, device: _Device) -> None:
        instruction, _ = device.program[device.next]
        if self.lax or not isinstance(instruction, Wait):
            device.queues.setdefault(instruction.stream, deque()).append(device.next)
        device.next += 1

    def _ready(self, device: _Device, position: int) -> bool:
        instruction, _ = device.program[position]
        if isinstance(instruction, Wait):
            return instruction.event in device.happened
        return position not in device.started

    def _advance(self, device: _Device, stream: str) -> None:
        position = device.queues[stream][0]
        instruction, run = device.program[position]
        meeting = instruction.rendezvous()
        if meeting is None:
            if run is not None:
                run()
            self._complete(device, position)
            return
        device.started.add(position)
        k = device.counts.get(meeting.communicator, 0)
        device.counts[meeting.communicator] = k + 1
        here = self.meetings.setdefault((meeting.communicator, k), [])
        here.append((device.number, position))
        if self.random.random() < 0.5:
            self.early[device.number, position] = self._read(device, instruction)
        for slot, message in zip(instruction.writes(), meeting.messages, strict=False):
            if meeting.role == "receive":
                dtype = torch_dtype(message.dtype)
                garbage = torch.nan if dtype.is_floating_point else 1 << 6
                device.slots[slot] = torch.full(message.shape, garbage, dtype=dtype)
        if len(here) == len(meeting.members):
            self._meet(here)

    def _read(self, device: _Device, instruction: Instruction) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for slot in instruction.reads():
            tensor = device.slots[slot]
            assert tensor is not None, f"read of empty slot {slot}"
            found.append(tensor.clone())
        return found

    def _meet(self, here: list[tuple[int, int]]) -> None:
        given: dict[int, list[torch.Tensor | None]] = {}
        roles: set[str] = set()
        messages = set()
        for number, position in here:
            device = self.devices[number]
            instruction, _ = device.program[position]
            meeting = instruction.rendezvous()
            assert meeting is not None
            roles.add(meeting.role)
            messages.add(meeting.messages)
            if (number, position) in self.early:
                given[number] = self.early[number, position]
            else:
                given[number] = self._read(device, instruction)
        if len(messages) != 1 or (len(roles) != 1 and roles != {"send", "receive"}):
            raise FailedError(f"members disagree: {roles} {messages}")
        for number, position in here:
            device = self.devices[number]
            instruction, _ = device.program[position]
            meeting = instruction.rendezvous()
            assert meeting is not None
            if isinstance(instruction, (ExchangeExperts, ExchangeCounts, ExchangeRows)):
                self._exchange(device, instruction, [given[m] for m in meeting.members])
                self._complete(device, position)
                continue
            for i, slot in enumerate(instruction.writes()):
                parts = [given[m][i] for m in meeting.members if len(given[m]) > i]
                shape = meeting.messages[i].shape
                if meeting.role == "reduce_scatter":
                    total = sum(parts[1:], parts[0].clone())
                    mine = padded(total, len(parts))[meeting.members.index(number)]
                    device.slots[slot] = mine.reshape(shape)
                elif meeting.role == "all_gather":
                    device.slots[slot] = whole(parts, shape)
                elif meeting.role == "refresh":
                    device.slots[slot].copy_(whole(parts, shape))
                else:
                    device.slots[slot] = self._combine(meeting.role, instruction, parts)
            self._complete(device, position)

    def _exchange(self, device: _Device, instruction, given) -> None:
        """Every member's part for *device*, put together: ``given`` is what each member reads."""
        me, count = instruction.members.index(device.number), len(given)
        ends = instruction.ends
        holders = list(range(count)) if ends is None else list(ends.holders)
        sources = list(range(count)) if ends is None else list(ends.sources)
        to, by = (sources, holders) if instruction.back else (holders, sources)
        if me not in to:
            assert not instruction.writes()
            return
        shapes = [message.shape for message in instruction.messages]
        mine = to.index(me)
        if isinstance(instruction, ExchangeCounts):
            matrix = torch.stack([given[m][0].chunk(len(to))[mine] for m in by])
            results = [matrix, matrix.sum(0)]
        elif isinstance(instruction, ExchangeExperts):
            sizes = list(instruction.sizes)
            cut, join = instruction.expert_dim, instruction.token_dim
            if instruction.back:
                sizes[cut] //= len(holders)
                cut, join = join, cut
            parts = [given[m][0].reshape(sizes).chunk(len(to), cut)[mine] for m in by]
            results = [torch.cat(parts, join).reshape(shapes[0])]
        else:
            counts = [given[m][-2 if m in holders else -1] for m in sources]
            matrices = [given[m][-1] for m in holders]
            rows = [given[m][0] for m in by]
            room = _rows_back if instruction.back else _rows_there
            here = room(rows, counts, matrices, mine)
            assert len(here) <= shapes[0][0], "no room"
            out = torch.zeros(shapes[0], dtype=rows[0].dtype)
            for i, row in enumerate(here):
                out[i] = row
            results = [out]
        for slot, result in zip(instruction.writes(), results, strict=True):
            device.slots[slot] = result

    def _combine(self, role: str, instruction: Instruction, parts) -> torch.Tensor:
        if role != "all_reduce":
            return parts[0].clone()
        if getattr(instruction, "reduce", None) is ReduceOp.MAX:
            return torch.stack(parts).amax(0)
        total = sum(parts[1:], parts[0].clone())
        return total / len(parts) if getattr(instruction, "average", False) else total

    def _complete(self, device: _Device, position: int) -> None:
        instruction, _ = device.program[position]
        device.queues[instruction.stream].popleft()
        if instruction.record is not None:
            device.happened.add(instruction.record)


def _rows_there(rows, counts, matrices, holder: int) -> list[torch.Tensor]:
    """What the sources' *rows*, of which they have *counts* by expert, come to on a holder, row by
    row.
    """
    experts = len(counts[0]) // len(matrices)
    starts = [mine.cumsum(0) - mine for mine in counts]
    found: list[torch.Tensor] = []
    for expert in range(holder * experts, (holder + 1) * experts):
        for each, mine, start in zip(rows, counts, starts, strict=True):
            found += list(each[start[expert] : start[expert] + mine[expert]])
    return found


def _rows_back(rows, counts, matrices, source: int) -> list[torch.Tensor]:
    """What the holders' *rows*, of which they have *matrices* by source and expert, come to on a
    source, row by row.
    """
    found: list[torch.Tensor] = []
    for holder, (each, matrix) in enumerate(zip(rows, matrices, strict=True)):
        by_expert = matrix.t().reshape(-1)  # how many rows of each expert, then source
        start = by_expert.cumsum(0) - by_expert
        experts = matrix.shape[1]
        for expert in range(experts):
            k = expert * len(counts) + source
            assert by_expert[k] == counts[source][holder * experts + expert]
            found += list(each[start[k] : start[k] + by_expert[k]])
    return found


def harm(plan: Plan, training: Training, expected: Outcome, *, schedules: int) -> str | None:
    """How *plan* goes wrong under the adversary, in words; ``None`` if it never did."""
    for seed in range(schedules):
        try:
            outcome = Adversary(plan, training, seed=seed, lax=seed % 3 != 0).run()
        except FailedError as failure:
            return str(failure)
        if (difference := differs(outcome, expected)) is not None:
            return difference
    return None
