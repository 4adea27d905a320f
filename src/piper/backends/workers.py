"""What all backends share: one worker per device, called by a driver."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from piper.backends.base import PlanKey, RecordedRun, RunResult, StepResult
from piper.backends.clocks import clock_offsets, on_other_clock
from piper.backends.holdings import (
    Holdings,
    by_device,
    holdings_of,
    moved,
    refuse_stale_copies,
    require_weights,
    state_names,
)
from piper.backends.snapshots import merged_snapshot, part_of
from piper.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    RunError,
    StateError,
)
from piper.plan.model import DevicePlan, Plan
from piper.runtime.batch import Batch, Data, FixedBatches, Signature, signature
from piper.runtime.checkpoint.reader import Checkpoint
from piper.runtime.checkpoint.writer import Refusal, WrittenFile
from piper.runtime.compiled import Compilation
from piper.runtime.global_random import same_random_numbers
from piper.runtime.optimizer import OptimizerSpec, group_parameters
from piper.runtime.record import Clock
from piper.runtime.snapshot import StateSnapshot, check_snapshot
from piper.runtime.state import Weights
from piper.runtime.worker import WorkerProfile, WorkerRun


@dataclass(slots=True)
class _Known:
    """A loaded plan, as the driver sees it."""

    plan: Plan
    signature: Signature
    constants: frozenset[str]
    suited: Holdings | None = None  # what was held when it was last seen to suit


class WorkerBackend(ABC):
    """Implements :class:`~piper.backends.base.Backend` over one
    :class:`~piper.runtime.worker.Worker` per device.

    A subclass says how workers are started, called and stopped.
    """

    def __init__(self) -> None:
        self._num_devices = 0
        self._known: dict[PlanKey, _Known] = {}
        self._holdings: Holdings | None = None
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
        """*value* in the form in which several workers' arguments may carry it at the cost of
        one.
        """
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
        """See :class:`~piper.backends.base.Backend`."""
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
        """See :class:`~piper.backends.base.Backend`."""
        if self._holdings is not None:
            refuse_stale_copies(plan, self._for(plan, frozenset(constants or ())))
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
        if self._holdings is not None:
            self._hold(self._for(plan, frozenset(own)))
        arguments = [
            {
                "key": key,
                "plan": shared,
                "mine": mine,
                "signature": signature,
                "constants": {n: own[n] for n in state_names(mine) if n in own},
                "compilation": compilation,
            }
            for mine in by_device(plan)
        ]
        self._call_all("load", arguments)
        self._known[key] = _Known(plan, signature, frozenset(own))

    def unload(self, key: PlanKey) -> None:
        """See :class:`~piper.backends.base.Backend`."""
        del self._known[key]
        self._call_all("unload", [{"key": key}] * self._num_devices)

    def initialise(
        self, key: PlanKey, weights: Weights, optimizer: OptimizerSpec | None = None
    ) -> None:
        """See :class:`~piper.backends.base.Backend`."""
        known = self._known[key]
        holdings = holdings_of(known.plan, known.constants)
        if optimizer is not None:
            group_parameters(known.plan.dag.parameters, optimizer.param_groups)
        if not callable(weights):
            require_weights(weights, holdings)
        arguments = [
            {"key": key, "weights": shared, "forms": forms, "optimizer": optimizer}
            for forms, shared in zip(
                holdings.forms, self._shared_weights(weights, holdings.names), strict=True
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
        lr_factors: Sequence[float] | None = None,
    ) -> RunResult:
        """See :class:`~piper.backends.base.Backend`."""
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
        self._hold_for(known)
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
                "lr_factors": lr_factors,
            }
            for mine in by_device(known.plan)
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
        lr_factors: Sequence[float] | None = None,
        ranges: bool = False,
    ) -> RecordedRun:
        """See :class:`~piper.backends.base.Backend`."""
        known = self._known[key]
        assert all(signature(batch) == known.signature for batch in batches)
        self._hold_for(known)
        offsets, error = clock_offsets(self._read_clocks)
        shared = self._share(FixedBatches(first_step, batches))
        arguments = [
            {
                "key": key,
                "data": shared if _loads_inputs(mine) else None,
                "first_step": first_step,
                "num_steps": len(batches),
                "seed": seed,
                "loss_scale": loss_scale,
                "lr_factors": lr_factors,
                "ranges": ranges,
            }
            for mine in by_device(known.plan)
        ]
        profiles = [_as_profile(r) for r in self._call_all("profile", arguments)]
        merged = _merge([WorkerRun(profile.steps) for profile in profiles])
        spans = zip(
            *(
                [on_other_clock(s, offset) for s in profile.spans]
                for profile, offset in zip(profiles, offsets, strict=True)
            ),
            strict=True,
        )
        return RecordedRun(merged.steps, tuple(spans), error)

    def _hold_for(self, known: _Known) -> None:
        """Let the devices hold what a loaded plan uses, as it uses it."""
        if known.suited is not self._holdings:
            self._hold(self._for(known.plan, known.constants))
            known.suited = self._holdings

    def _for(self, plan: Plan, constants: frozenset[str]) -> Holdings:
        """What devices are to hold to run *plan*."""
        return moved(self._initialised(), plan, constants)

    def _hold(self, wanted: Holdings) -> None:
        """Move the state, parameters with that of the optimizer, to where *wanted* has it: by way
        of the driver, which is slow, but seldom.
        """
        if wanted is self._holdings:
            return
        state = self.snapshot(optimizer=True)
        arguments = [
            {"forms": forms, "snapshot": part_of(state, tuple(forms))} for forms in wanted.forms
        ]
        with same_random_numbers():  # optimizers are made anew
            self._call_all("hold", arguments)
        self._holdings = wanted

    def _read_clocks(self) -> list[Clock]:
        nothing: list[Mapping[str, object]] = [{}] * self._num_devices
        return [_as_clock(c) for c in self._call_all("clock", nothing)]

    def snapshot(self, *, optimizer: bool = True) -> StateSnapshot:
        """See :class:`~piper.backends.base.Backend`."""
        holdings = self._initialised()
        arguments = [{"names": names, "optimizer": optimizer} for names in holdings.owned]
        parts = [_as_snapshot(s) for s in self._call_all("snapshot", arguments)]
        return merged_snapshot(parts, holdings.plan.dag)

    def copies(self) -> list[StateSnapshot]:
        """See :class:`~piper.backends.base.Backend`."""
        arguments = [
            {"names": n, "optimizer": True, "everything": True} for n in self._initialised().names
        ]
        return [_as_snapshot(s) for s in self._call_all("snapshot", arguments)]

    def restore(self, snapshot: StateSnapshot) -> None:
        """See :class:`~piper.backends.base.Backend`."""
        holdings = self._initialised()
        dag = holdings.plan.dag
        check_snapshot(snapshot, dag.parameters, dag.buffers, dag.precision)
        self._call_all(
            "restore", [{"snapshot": part_of(snapshot, names)} for names in holdings.names]
        )

    def write_files(self, folder: Path) -> tuple[WrittenFile, ...]:
        """See :class:`~piper.backends.base.Backend`."""
        owned = self._initialised().owned
        arguments = [{"folder": folder, "names": names} for names in owned]
        results = self._call_all("write_file", arguments)
        _raise_refusals(results)
        return tuple(result for result in results if isinstance(result, WrittenFile))

    def read_files(self, checkpoint: Checkpoint) -> None:
        """See :class:`~piper.backends.base.Backend`."""
        self._initialised()
        shared, files = self._share(checkpoint), range(len(checkpoint.index.files))
        arguments = [
            {"checkpoint": shared, "files": files[rank :: self._num_devices]}
            for rank in range(self._num_devices)
        ]
        _raise_refusals(self._call_all("check_files", arguments))
        self._call_all("read_files", [{"checkpoint": shared}] * self._num_devices)

    def close(self) -> None:
        """See :class:`~piper.backends.base.Backend`."""
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

    def _initialised(self) -> Holdings:
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


def _common(plan: Plan) -> Plan:
    """What every worker needs of *plan*, see :meth:`~piper.runtime.worker.Worker.load`."""
    dag = replace(plan.dag, values={}, contributions={}, order=(), directives=())
    return replace(plan, dag=dag, devices=())


def _loads_inputs(mine: DevicePlan) -> bool:
    return any(i.loads() is not None for i in mine.instructions)


def _as_run(result: object) -> WorkerRun:
    assert isinstance(result, WorkerRun)
    return result


def _as_profile(result: object) -> WorkerProfile:
    assert isinstance(result, WorkerProfile)
    return result


def _as_clock(result: object) -> Clock:
    assert isinstance(result, Clock)
    return result


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
