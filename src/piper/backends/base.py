"""What the API needs from a backend, and what all backends share.

A backend owns one worker per device. The driver loads plans, gives the workers their state and runs
steps; whatever a step needs was shipped before it. One driver thread uses a backend at a time.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import torch

from piper.devices.tensors import torch_dtype
from piper.errors import (
    AbortedError,
    BatchError,
    CheckpointError,
    CommunicationError,
    ConfigError,
    PiperError,
    RunError,
    StateError,
)
from piper.ir.dag import ElementTypes, Parameter, Role
from piper.ops.load_input import LoadInput
from piper.ops.update import OptimizerStep
from piper.ops.write_buffer import WriteBuffer
from piper.plan.model import DevicePlan, Plan
from piper.registry import Registry
from piper.runtime.batch import Batch, Data, FixedBatches, Signature, signature
from piper.runtime.checkpoint import Checkpoint, Refusal, WrittenFile
from piper.runtime.compiled import Compilation
from piper.runtime.record import Clock, Spans
from piper.runtime.state import (
    OptimizerSnapshot,
    OptimizerSpec,
    StateSnapshot,
    Weights,
    check_snapshot,
    group_parameters,
    merge_slices,
    per_element,
)
from piper.runtime.worker import WorkerProfile, WorkerRun

_CLOCK_READINGS = 20

PlanKey: TypeAlias = str
"""The driver's name for a loaded plan."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the workers reported of one step.

    ``values[name][microbatch]`` is a reported scalar: ``loss`` and, for a weighted loss,
    ``weight``, by global microbatch number. ``seconds`` is the time of the slowest worker.
    """

    step: int
    values: dict[str, dict[int, float]]
    seconds: float


@dataclass(frozen=True, slots=True)
class RunResult:
    """The completed steps, in order.

    ``stopped_at`` is the step whose batch did not have the plan's signature, with the ``signature``
    that was found; no device has begun that step. Both are ``None`` when all steps were run.
    """

    steps: tuple[StepResult, ...]
    stopped_at: int | None = None
    signature: Signature | None = None


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Recorded steps: what they reported, and per step and device when each instruction ran, on the clock of device 0, which is known to
    ``clock_error`` seconds (0 where all workers share one clock).
    """

    steps: tuple[StepResult, ...]
    spans: tuple[tuple[Spans, ...], ...]
    clock_error: float


class Backend(Protocol):
    """Runs plans on devices. Use: ``start``, ``load``, ``initialise``, then anything, at last
    ``close``.

    Every method raises the root cause of what failed on a worker: a :class:`~piper.errors.RunError`
    that names device, node, microbatch and instruction, with the original traceback in its text.
    After that the backend is closed: no worker is left, every later call raises
    :class:`~piper.errors.RunError` that says why.
    """

    def start(self, num_devices: int) -> None:
        """Start one worker per device.

        Raises :class:`~piper.errors.ConfigError` before any worker is started when there are too
        few devices.
        """

    def load(
        self,
        key: PlanKey,
        plan: Plan,
        signature: Signature,
        constants: Mapping[str, torch.Tensor] | None = None,
        compilation: Compilation = Compilation.OFF,
    ) -> None:
        """Ship *plan*, for global batches of *signature*, to all workers under *key* and make it
        ready to run.

        *constants* are the values of buffers that this plan alone has (tensors that capture found);
        they belong to the plan, not to the state. A plan loaded after ``initialise`` may else use
        only parameters and buffers that its device holds. *compilation* says whether chunks are compiled: here, or
        by ``initialise`` for plans loaded before it. A failure is a :class:`~piper.errors.CompileError`.
        """

    def initialise(
        self, key: PlanKey, weights: Weights, optimizer: OptimizerSpec | None = None
    ) -> None:
        """Give every device the parameters and buffers that the loaded plan *key* uses there, and
        an optimizer for them.

        What the plan uses nowhere is held by device 0, so that the snapshot is complete. *weights*
        is a mapping of tensors by name, or a function from names to such a mapping that the workers
        call.
        """

    def run(
        self,
        key: PlanKey,
        data: Data | Sequence[Batch],
        *,
        first_step: int,
        num_steps: int | None = None,
        seed: int = 0,
        loss_scale: float = 1.0,
    ) -> RunResult:
        """Run steps ``first_step`` to ``first_step + num_steps - 1`` of plan *key*, one call per
        worker.

        *data* is a list of global batches, one per step (*num_steps* may be left out), or a
        function of the step that is called by the workers that load inputs. A step whose batch has
        another signature than the plan ends the run before that step, on all devices alike. *loss_scale* is what a plan whose loss is
        scaled scales it by, in all of these steps.
        """

    def profile(
        self,
        key: PlanKey,
        batches: Sequence[Batch],
        *,
        first_step: int,
        seed: int = 0,
        loss_scale: float = 1.0,
        ranges: bool = False,
    ) -> RecordedRun:
        """Like :meth:`run` on *batches*, which have the plan's signature, with every instruction's start and end
        recorded; *ranges*: they are ranges of torch's profiler too.
        """

    def snapshot(self, *, optimizer: bool = True) -> StateSnapshot:
        """Parameters, buffers and optimizer state by name, on the CPU, each tensor a copy."""

    def copies(self) -> list[StateSnapshot]:
        """Everything that each device holds, by device: several devices may hold one name."""

    def restore(self, snapshot: StateSnapshot) -> None:
        """Overwrite the devices' state with *snapshot*, whatever layout it was taken from.

        Raises :class:`~piper.errors.StateError` for missing, unexpected or misshapen entries,
        before anything is changed.
        """

    def write_files(self, folder: Path) -> tuple[WrittenFile, ...]:
        """Let each device write its file of a checkpoint into *folder*, which all share: what it owns of the state.

        Raises :class:`~piper.errors.CheckpointError` when one cannot, after which the backend is as before.
        """

    def read_files(self, checkpoint: Checkpoint) -> None:
        """Overwrite the devices' state with *checkpoint*, whatever layout it was written under; its names and shapes were checked.

        Raises :class:`~piper.errors.CheckpointError`, before anything is changed, for damaged files and another class of optimizer.
        """

    def close(self) -> None:
        """Stop all workers and give back everything. May be called twice."""


BackendFactory: TypeAlias = Callable[..., Backend]

BACKENDS: Registry[BackendFactory] = Registry("backend", ConfigError)
"""By name; a factory takes the backend's options as keywords."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker's call failed: a report that crosses process boundaries. ``kind`` is the class
    to raise.
    """

    device: int
    kind: type[PiperError]
    message: str

    @property
    def rank(self) -> int:
        """Order of causes: real errors, then lost peers, then workers that were told to stop."""
        if issubclass(self.kind, AbortedError):
            return 2
        return 1 if issubclass(self.kind, CommunicationError) else 0

    def error(self) -> PiperError:
        """The exception to raise on the driver."""
        return self.kind(self.message)


def failure_of(device: int, error: BaseException) -> Failure:
    """The report of *error*, raised on *device*. Piper's own errors say where they happened."""
    if isinstance(error, PiperError):
        return Failure(device, type(error), str(error))
    text = "".join(traceback.format_exception(error)).rstrip()
    return Failure(device, RunError, f"device {device}: {type(error).__name__}: {error}\n{text}")


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The one that explains the others."""
    return min(failures, key=lambda failure: (failure.rank, failure.device))


_Form: TypeAlias = tuple[tuple[int, int] | None, tuple[int, int] | None]
"""Which of how many parts of the experts, which of how many slices."""


@dataclass(slots=True)
class _Known:
    """A loaded plan, as the driver sees it."""

    plan: Plan
    signature: Signature
    constants: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """Which device holds which state names, and from which device a snapshot takes each."""

    plan: Plan
    names: tuple[tuple[str, ...], ...]
    owned: tuple[tuple[str, ...], ...] = field(default=())


class WorkerBackend(ABC):
    """Implements :class:`Backend` over one :class:`~piper.runtime.worker.Worker` per device.

    A subclass says how workers are started, called and stopped.
    """

    def __init__(self) -> None:
        self._num_devices = 0
        self._known: dict[PlanKey, _Known] = {}
        self._holdings: _Holdings | None = None
        self._closed: str | None = "it was not started"

    @abstractmethod
    def _start(self, num_devices: int) -> None:
        """Start the workers."""

    @abstractmethod
    def _call(self, method: str, arguments: Sequence[Mapping[str, object]]) -> list[object]:
        """Call *method* on every worker, worker i with keywords ``arguments[i]``; the results, by
        device.

        Raises the root cause when any call fails, after the workers were stopped.
        """

    @abstractmethod
    def _stop(self) -> None:
        """Stop the workers, at once. May be called twice."""

    def _share(self, value: object) -> object:
        """*value* in the form in which several workers' arguments may carry it at the cost of one."""
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, num_devices: int) -> None:
        """See :class:`Backend`."""
        if num_devices < 1:
            raise ConfigError(f"expected at least 1 device, found {num_devices}")
        assert self._closed is not None, "started twice"
        try:
            self._start(num_devices)
        except BaseException:
            self._stop()
            raise
        self._num_devices = num_devices
        self._closed = None

    def load(
        self,
        key: PlanKey,
        plan: Plan,
        signature: Signature,
        constants: Mapping[str, torch.Tensor] | None = None,
        compilation: Compilation = Compilation.OFF,
    ) -> None:
        """See :class:`Backend`."""
        if self._holdings is not None:
            _refuse_missing_copies(plan, self._holdings, frozenset(constants or ()))
            _refuse_stale_copies(plan, self._holdings)
        if plan.roles:
            raise ConfigError(
                f"the plan is folded: it has programs for {len(plan.roles)} of its {plan.num_devices} devices, enough to verify and simulate it; "
                "plan without fold=True to run it"
            )
        if plan.num_devices != self._num_devices:
            raise ConfigError(
                f"the plan is for {plan.num_devices} devices, the backend has {self._num_devices}; start the backend "
                f"with as many devices as the strategy names"
            )
        shared, own = self._share(_common(plan)), dict(constants or {})
        arguments = [
            {
                "key": key,
                "plan": shared,
                "mine": mine,
                "signature": signature,
                "constants": {n: own[n] for n in _state_names(mine) if n in own},
                "compilation": compilation,
            }
            for mine in _by_device(plan)
        ]
        self._call_all("load", arguments)
        self._known[key] = _Known(plan, signature, frozenset(own))

    def initialise(
        self, key: PlanKey, weights: Weights, optimizer: OptimizerSpec | None = None
    ) -> None:
        """See :class:`Backend`."""
        known = self._known[key]
        holdings = _holdings(known.plan, known.constants)
        if optimizer is not None:
            group_parameters(known.plan.dag.parameters, optimizer.param_groups)
        if not callable(weights):
            _check_weights(weights, holdings)
        arguments = [
            {"key": key, "weights": shared, "names": names, "optimizer": optimizer}
            for names, shared in zip(
                holdings.names, self._shared_weights(weights, holdings.names), strict=True
            )
        ]
        self._call_all("initialise", arguments)
        self._holdings = holdings

    def run(
        self,
        key: PlanKey,
        data: Data | Sequence[Batch],
        *,
        first_step: int,
        num_steps: int | None = None,
        seed: int = 0,
        loss_scale: float = 1.0,
    ) -> RunResult:
        """See :class:`Backend`."""
        known = self._known[key]
        count, stopped, found = 0, None, None
        source: Data
        if callable(data):
            if num_steps is None:
                raise ConfigError("num_steps is needed when data is a function of the step")
            count, source = num_steps, data
        else:
            count = len(data) if num_steps is None else num_steps
            if count > len(data):
                raise BatchError(f"num_steps is {count}, but there are {len(data)} batches")
            source = FixedBatches(first_step, data)
            good = next((i for i in range(count) if signature(data[i]) != known.signature), count)
            if good < count:
                count, stopped, found = good, first_step + good, signature(data[good])
        if count == 0:
            return RunResult((), stopped, found)
        shared = self._share(source)
        arguments = [
            {
                "key": key,
                "data": shared if _loads_inputs(mine) else None,
                "first_step": first_step,
                "num_steps": count,
                "seed": seed,
                "agree": callable(data),
                "loss_scale": loss_scale,
            }
            for mine in _by_device(known.plan)
        ]
        merged = _merge([_as_run(r) for r in self._call_all("run", arguments)])
        return merged if stopped is None else RunResult(merged.steps, stopped, found)

    def profile(
        self,
        key: PlanKey,
        batches: Sequence[Batch],
        *,
        first_step: int,
        seed: int = 0,
        loss_scale: float = 1.0,
        ranges: bool = False,
    ) -> RecordedRun:
        """See :class:`Backend`."""
        known = self._known[key]
        assert all(signature(batch) == known.signature for batch in batches)
        offsets, error = self._clock_offsets()
        shared = self._share(FixedBatches(first_step, batches))
        arguments = [
            {
                "key": key,
                "data": shared if _loads_inputs(mine) else None,
                "first_step": first_step,
                "num_steps": len(batches),
                "seed": seed,
                "loss_scale": loss_scale,
                "ranges": ranges,
            }
            for mine in _by_device(known.plan)
        ]
        profiles = [_as_profile(r) for r in self._call_all("profile", arguments)]
        merged = _merge([WorkerRun(profile.steps) for profile in profiles])
        spans = zip(
            *(
                [_shifted(s, offset) for s in profile.spans]
                for profile, offset in zip(profiles, offsets, strict=True)
            ),
            strict=True,
        )
        return RecordedRun(merged.steps, tuple(spans), error)

    def _clock_offsets(self) -> tuple[list[float], float]:
        """What each worker's clock is ahead of device 0's, and by how much that may be wrong.

        A worker reads its clock between the driver's call and the answer; of several calls the quickest says most (Cristian, 1989). Workers on one machine share its clock.
        """
        nothing: list[Mapping[str, object]] = [{}] * self._num_devices
        best, ahead = float("inf"), [0.0] * self._num_devices
        for _ in range(_CLOCK_READINGS):
            asked = time.perf_counter()
            clocks = [_as_clock(c) for c in self._call_all("clock", nothing)]
            answered = time.perf_counter()
            if len({clock.machine for clock in clocks}) == 1:
                return [0.0] * self._num_devices, 0.0
            if answered - asked < best:
                best = answered - asked
                ahead = [clock.seconds - (asked + answered) / 2 for clock in clocks]
        return [offset - ahead[0] for offset in ahead], best

    def snapshot(self, *, optimizer: bool = True) -> StateSnapshot:
        """See :class:`Backend`."""
        holdings = self._initialised()
        arguments = [{"names": names, "optimizer": optimizer} for names in holdings.owned]
        parts = [_as_snapshot(s) for s in self._call_all("snapshot", arguments)]
        dag = holdings.plan.dag
        return _widened(_merge_snapshots(_assembled(parts, dag.parameters)), dag.precision)

    def copies(self) -> list[StateSnapshot]:
        """See :class:`Backend`."""
        arguments = [
            {"names": n, "optimizer": True, "everything": True} for n in self._initialised().names
        ]
        return [_as_snapshot(s) for s in self._call_all("snapshot", arguments)]

    def restore(self, snapshot: StateSnapshot) -> None:
        """See :class:`Backend`."""
        holdings = self._initialised()
        dag = holdings.plan.dag
        check_snapshot(snapshot, dag.parameters, dag.buffers, dag.precision)
        self._call_all(
            "restore", [{"snapshot": _part(snapshot, names)} for names in holdings.names]
        )

    def write_files(self, folder: Path) -> tuple[WrittenFile, ...]:
        """See :class:`Backend`."""
        owned = self._initialised().owned
        arguments = [{"folder": folder, "names": names} for names in owned]
        results = self._call_all("write_file", arguments)
        _raise_refusals(results)
        return tuple(result for result in results if isinstance(result, WrittenFile))

    def read_files(self, checkpoint: Checkpoint) -> None:
        """See :class:`Backend`."""
        self._initialised()
        shared, files = self._share(checkpoint), range(len(checkpoint.index.files))
        arguments = [
            {"checkpoint": shared, "files": files[rank :: self._num_devices]}
            for rank in range(self._num_devices)
        ]
        _raise_refusals(self._call_all("check_files", arguments))
        self._call_all("read_files", [{"checkpoint": shared}] * self._num_devices)

    def close(self) -> None:
        """See :class:`Backend`."""
        if self._closed is None:
            self._closed = "it was closed"
        self._stop()

    def _call_all(self, method: str, arguments: Sequence[Mapping[str, object]]) -> list[object]:
        if self._closed is not None:
            raise RunError(f"the backend cannot be used: {self._closed}")
        try:
            return self._call(method, arguments)
        except BaseException as error:
            first_line = str(error).partition("\n")[0]
            self._closed = f"it was closed after {type(error).__name__}: {first_line}"
            self._stop()
            raise

    def _initialised(self) -> _Holdings:
        if self._holdings is None:
            raise StateError("the workers have no state yet; call initialise first")
        return self._holdings

    def _shared_weights(self, weights: Weights, names: Sequence[tuple[str, ...]]) -> list[object]:
        """Each device's weights; devices that hold the same names share one copy."""
        if callable(weights):
            return [self._share(weights)] * len(names)
        parts = {
            held: self._share({n: weights[n].detach() for n in held})
            for held in dict.fromkeys(names)
        }
        return [parts[held] for held in names]


def _raise_refusals(results: Sequence[object]) -> None:
    """Raise what the first device says that could not do its part."""
    for device, result in enumerate(results):
        if isinstance(result, Refusal):
            raise CheckpointError(f"device {device}: {result.message}")


def _refuse_missing_copies(plan: Plan, holdings: _Holdings, constants: frozenset[str]) -> None:
    """Refuse a plan that uses a parameter or buffer on a device that does not hold it, or not in that form: whole, or the same slice."""
    for mine, first in zip(_by_device(plan), _by_device(holdings.plan), strict=False):
        held = constants.union(holdings.names[mine.device])
        if missing := [name for name in _state_names(mine) if name not in held]:
            raise StateError(
                f"the plan for this batch uses {missing[0]!r} on device {mine.device}, which holds no parameter or buffer of that name: the "
                f"first plan does not use it there. Begin with a batch that uses it, or place its regions on one device"
            )
        forms = {(i.name, i.shard, i.experts) for i in first.slots if i.role in _PARAMETERS}
        forms |= {(name, None, None) for name in held - {name for name, *_ in forms}}
        dag = holdings.plan.dag
        forms |= {
            (name, (0, 1), experts)
            for name, shard, experts in forms
            if shard is None and name in dag.parameters and dag.has_master(name)
        }
        for info in mine.slots:
            if info.role in _PARAMETERS and (info.name, info.shard, info.experts) not in forms:
                whole = info.shard is None and info.experts is None
                form = "whole" if whole else "a slice of it"
                raise StateError(
                    f"the plan for this batch uses parameter {info.name!r}, {form}, on device {mine.device}, which does not hold it in this form: "
                    f"the first plan does not train it, or shards it in another way. Begin with a batch that trains it"
                )


def _refuse_stale_copies(plan: Plan, holdings: _Holdings) -> None:
    """Refuse a plan that writes a parameter or buffer on some of the devices that hold it, but not on all."""
    written: dict[str, set[int]] = {}
    for mine in plan.devices:
        for instruction in mine.instructions:
            if isinstance(instruction, OptimizerStep):
                names: tuple[str, ...] = instruction.names
            else:
                names = (instruction.name,) if isinstance(instruction, WriteBuffer) else ()
            for name in names:
                written.setdefault(name, set()).add(mine.device)
    for name, devices in written.items():
        holders = {device for device, names in enumerate(holdings.names) if name in names}
        if stale := sorted(holders - devices):
            raise StateError(
                f"{name!r} is held by devices {sorted(holders)}, but the plan for this batch writes it on {sorted(devices)} only: the "
                f"copy on {stale} would be out of date. Use it in the same regions at every step, or place these on one device"
            )


def _by_device(plan: Plan) -> list[DevicePlan]:
    return sorted(plan.devices, key=lambda mine: mine.device)


def _common(plan: Plan) -> Plan:
    """What every worker needs of *plan*, see :meth:`~piper.runtime.worker.Worker.load`."""
    dag = replace(plan.dag, values={}, contributions={}, order=(), directives=())
    return replace(plan, dag=dag, devices=())


def _loads_inputs(mine: DevicePlan) -> bool:
    return any(isinstance(i, LoadInput) for i in mine.instructions)


_PARAMETERS = (Role.PARAMETER, Role.SHARD)
_NAMED = (*_PARAMETERS, Role.BUFFER)


def _state_names(mine: DevicePlan) -> list[str]:
    """Parameters and buffers that a device's plan uses, in slot order."""
    names = [i.name for i in mine.slots if i.role in _NAMED]
    return list(dict.fromkeys(names))


def _holdings(plan: Plan, constants: frozenset[str]) -> _Holdings:
    devices = _by_device(plan)
    held = [[n for n in _state_names(mine) if n not in constants] for mine in devices]
    used = {name for names in held for name in names}
    model = (*plan.dag.parameters, *plan.dag.buffers)
    held[0] += [n for n in model if n not in used and n not in constants]
    # A buffer that the step writes is current where it is written. Every slice of a sharded parameter is owned once.
    sliced = [_slices(mine) for mine in devices]
    owner: dict[tuple[str, _Form | None], int] = {}
    for rank, mine in enumerate(devices):
        for instruction in mine.instructions:
            if isinstance(instruction, WriteBuffer):
                owner.setdefault((instruction.name, None), rank)
    for rank, names in enumerate(held):
        for name in names:
            owner.setdefault((name, sliced[rank].get(name)), rank)
    owned = tuple(
        tuple(n for n in held[r] if owner[n, sliced[r].get(n)] == r) for r in range(len(devices))
    )
    return _Holdings(plan, tuple(tuple(names) for names in held), owned)


def _slices(mine: DevicePlan) -> dict[str, _Form]:
    """Which slice, of which part of the experts, a device holds of each parameter that it does not hold whole."""
    found: dict[str, _Form] = {}
    for info in mine.slots:
        if info.shard is not None or (info.experts is not None and info.name not in found):
            found[info.name] = (info.experts, info.shard)
    return found


def _check_weights(weights: Mapping[str, torch.Tensor], holdings: _Holdings) -> None:
    missing = sorted({n for names in holdings.names for n in names if n not in weights})
    if missing:
        raise StateError(f"no initial value for {missing[0]!r} ({len(missing)} missing in all)")


def _as_run(result: object) -> WorkerRun:
    assert isinstance(result, WorkerRun)
    return result


def _as_profile(result: object) -> WorkerProfile:
    assert isinstance(result, WorkerProfile)
    return result


def _as_clock(result: object) -> Clock:
    assert isinstance(result, Clock)
    return result


def _shifted(spans: Spans, ahead: float) -> Spans:
    """*spans* of a clock that is *ahead*, on the other clock."""
    if not ahead:
        return spans
    begin = tuple(t - ahead if t else t for t in spans.begin)
    end = tuple(t - ahead if t else t for t in spans.end)
    return Spans(begin, end, spans.began - ahead, spans.finished - ahead)


def _as_snapshot(result: object) -> StateSnapshot:
    assert isinstance(result, StateSnapshot)
    return result


def _merge(runs: Sequence[WorkerRun]) -> RunResult:
    """One result of all devices' reports of the same steps."""
    steps: list[StepResult] = []
    for reports in zip(*(run.steps for run in runs), strict=True):
        values: dict[str, dict[int, float]] = {}
        for report in reports:
            for name, by_microbatch in report.values.items():
                values.setdefault(name, {}).update(by_microbatch)
        ordered = {name: dict(sorted(values[name].items())) for name in sorted(values)}
        steps.append(StepResult(reports[0].step, ordered, max(r.seconds for r in reports)))
    found = next((run.signature for run in runs if run.signature is not None), None)
    return RunResult(tuple(steps), runs[0].stopped_at, found)


def _assembled(
    parts: Sequence[StateSnapshot], parameters: Mapping[str, Parameter]
) -> list[StateSnapshot]:
    """*parts*, and one part more that holds whole the parameters of which they have slices."""
    slices: dict[str, dict[tuple[int, int], StateSnapshot]] = {}
    for part in parts:
        for name, shard in part.shards.items():
            slices.setdefault(name, {})[shard.part.experts[0], shard.part.index] = part
    whole: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, object]] = {}
    for name, by_index in slices.items():
        ordered = [by_index[i] for i in sorted(by_index)]
        shape = [int(str(d)) for d in parameters[name].spec.shape]
        whole[name] = merge_slices([p.shards[name].tensor for p in ordered], shape)
        lengths = [tuple(p.shards[name].tensor.shape) for p in ordered]
        entries = [
            p.optimizer.state[name] for p in ordered if p.optimizer and name in p.optimizer.state
        ]
        if entries:
            state[name] = {
                key: _merge_entry(key, [e[key] for e in entries], lengths, shape)
                for key in entries[0]
            }
    groups = next((p.optimizer.groups for p in parts if p.optimizer is not None), None)
    optimizer = None if groups is None else OptimizerSnapshot(state, groups)
    return [_without_shards(part) for part in parts] + [StateSnapshot(whole, {}, optimizer)]


def _merge_entry(
    key: str,
    values: Sequence[object],
    lengths: Sequence[tuple[int, ...]],
    shape: Sequence[int],
) -> object:
    tensors = [
        value
        for value, length in zip(values, lengths, strict=False)
        if isinstance(value, torch.Tensor) and per_element(key, value, length)
    ]
    return merge_slices(tensors, shape) if len(tensors) == len(values) else values[0]


def _without_shards(part: StateSnapshot) -> StateSnapshot:
    optimizer = part.optimizer
    if optimizer is not None:
        state = {n: s for n, s in optimizer.state.items() if n not in part.shards}
        optimizer = OptimizerSnapshot(state, optimizer.groups)
    return StateSnapshot(part.parameters, part.buffers, optimizer)


def _merge_snapshots(parts: Sequence[StateSnapshot]) -> StateSnapshot:
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    state: dict[str, Mapping[str, object]] = {}
    groups: tuple[dict[str, object], ...] | None = None
    for part in parts:
        parameters |= part.parameters
        buffers |= part.buffers
        if part.optimizer is not None:
            state |= part.optimizer.state
            groups = part.optimizer.groups if groups is None else groups
    optimizer = None if groups is None else OptimizerSnapshot(state, groups)
    return StateSnapshot(parameters, buffers, optimizer)


def _widened(snapshot: StateSnapshot, types: ElementTypes | None) -> StateSnapshot:
    """*snapshot* with all floating-point parameters in the master type of *types*, those too that are not trained and kept in a shorter one."""
    if types is None:
        return snapshot
    master = torch_dtype(types.master)
    parameters = {
        n: t.to(master) if t.is_floating_point() else t for n, t in snapshot.parameters.items()
    }
    return replace(snapshot, parameters=parameters)


def _part(snapshot: StateSnapshot, names: Sequence[str]) -> StateSnapshot:
    """What a device that holds *names* needs of *snapshot*."""
    wanted = set(names)
    optimizer = snapshot.optimizer
    if optimizer is not None:
        state = {n: s for n, s in optimizer.state.items() if n in wanted}
        optimizer = OptimizerSnapshot(state, optimizer.groups)
    return StateSnapshot(
        {n: t for n, t in snapshot.parameters.items() if n in wanted},
        {n: t for n, t in snapshot.buffers.items() if n in wanted},
        optimizer,
    )
