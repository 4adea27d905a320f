"""How much memory the plan may use: bounds on what is started before it is needed, chosen so that
every device's peak fits.

What receives, gathers and fetches hold while they are early, and what collectives have in flight,
is the only part of a step's memory that the planner is free to choose; all else follows from the
strategy. The bounds go down a ladder of halves, all together, from what they are without a budget
to nothing; the highest step that fits is found by bisection. Then each is put back to the top by
itself if that fits too. So a plan is cut a few times at most; the order of its nodes is chosen
once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from piper.errors import MemoryBudgetError
from piper.ids import DeviceId
from piper.ir.dag import Level
from piper.plan.account import OptimizerBytes, account
from piper.plan.memory import Category, DeviceMemory
from piper.plan.model import Plan
from piper.sizes import size_text

RECEIVE_BYTES = 16 * 1024 * 1024
"""Bound on early receives where none is given: more hides nothing, since a sender is seldom that
far ahead.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes per device that may be received, gathered and fetched before they are needed, and that
    other collectives may be given that are in flight; ``None``: the planner's default.
    """

    receive: int | None = None
    gather: int | None = None
    fetch: int | None = None
    reduce: int | None = None

    def filled(self, defaults: "Bounds") -> "Bounds":
        """These, and *defaults* where there is none."""
        return Bounds(
            defaults.receive if self.receive is None else self.receive,
            defaults.gather if self.gather is None else self.gather,
            defaults.fetch if self.fetch is None else self.fetch,
            defaults.reduce if self.reduce is None else self.reduce,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What is said about memory where a step is planned.

    ``budget`` bounds each device's planned peak in bytes, ``bounds`` are those that are given. What
    the peak contains of the optimizer's state and of what carries messages, ``optimizer_bytes`` and
    ``frame_bytes`` say, as in :func:`~piper.plan.account.account`.
    """

    budget: int | None = None
    bounds: Bounds = field(default_factory=Bounds)
    optimizer_bytes: OptimizerBytes = 0
    frame_bytes: Callable[[int], int] = int


Cut: TypeAlias = Callable[[Bounds], tuple[Plan, Bounds]]
"""Makes a plan under bounds, and says what they come to: no bound is higher than what there is to
start early.
"""


def plan_within(limits: Limits, cut: Cut) -> Plan:
    """The plan that *cut* makes under the highest bounds with which every device's peak is within
    the budget.

    Raises :class:`MemoryBudgetError` if it is not even with the lowest.
    """
    plan, top = cut(limits.bounds)
    if limits.budget is None:
        return plan
    return _Search(limits, limits.budget, cut, plan, top).run()


class _Search:
    def __init__(self, limits: Limits, budget: int, cut: Cut, plan: Plan, top: Bounds) -> None:
        self._limits, self._budget, self._cut = limits, budget, cut
        self._top, self._first = top, plan
        self._best: tuple[Plan, Sequence[DeviceMemory]] | None = None  # of those that do not fit

    def run(self) -> Plan:
        if self._fits(self._first):
            return self._first
        given = self._limits.bounds
        free = [
            name
            for name in ("fetch", "gather", "receive", "reduce")
            if getattr(given, name) is None and getattr(self._top, name)
        ]
        low, high = 0, max((getattr(self._top, name).bit_length() for name in free), default=0)
        if not free or (found := self._try(self._lowered(dict.fromkeys(free, high)))) is None:
            raise self._error()
        while high - low > 1:  # `low` does not fit, `high` does
            middle = (low + high) // 2
            if (plan := self._try(self._lowered(dict.fromkeys(free, middle)))) is None:
                low = middle
            else:
                high, found = middle, plan
        steps = dict.fromkeys(free, high)
        for name in free:
            if len(free) > 1 and (plan := self._try(self._lowered({**steps, name: 0}))) is not None:
                steps, found = {**steps, name: 0}, plan
        return found

    def _lowered(self, steps: Mapping[str, int]) -> Bounds:
        """The bounds so many halves below the top."""
        names = ("receive", "gather", "fetch", "reduce")
        return Bounds(*(getattr(self._top, name) >> steps.get(name, 0) for name in names))

    def _try(self, bounds: Bounds) -> Plan | None:
        """The plan under *bounds* if it fits."""
        plan, _ = self._cut(bounds)
        return plan if self._fits(plan) else None

    def _fits(self, plan: Plan) -> bool:
        limits = self._limits
        memory = account(plan, limits.optimizer_bytes, frame_bytes=limits.frame_bytes)
        if _peak(memory) <= self._budget:
            return True
        if self._best is None or _peak(memory) < _peak(self._best[1]):
            self._best = plan, memory
        return False

    def _error(self) -> MemoryBudgetError:
        assert self._best is not None
        plan, memory = self._best
        worst = max(memory, key=lambda m: m.peak)
        over = [m.device for m in memory if m.peak > self._budget]
        others = f" (over the budget: devices {_devices(over)})" if len(over) > 1 else ""
        parts = sorted(worst.by_category.items(), key=lambda item: -item[1])
        parts = [(c, n) for c, n in parts if n and c in _ADVICE]
        listed = "\n".join(f"  {size_text(n):>10}  {c.value}" for c, n in parts)
        advice = "\n".join(f"  {text}" for text in _advice(plan, parts))
        return MemoryBudgetError(
            f"memory_budget is {size_text(self._budget)} ({self._budget} bytes) per device, but device {worst.device} needs "
            f"{size_text(worst.peak)} for a step under this strategy{others}: a budget of {worst.peak} bytes would do. Its peak is after "
            f"instruction {worst.position}, {_place(plan, worst)}, with\n{listed}\nWhat could lower it:\n{advice}"
        )


def _peak(memory: Sequence[DeviceMemory]) -> int:
    return max(m.peak for m in memory)


def _place(plan: Plan, memory: DeviceMemory) -> str:
    """For people: where a device is at its peak."""
    instruction = plan.devices[memory.device].instructions[memory.position]
    node = plan.dag.nodes.get(instruction.node)
    return f"`{instruction.op}`" if node is None else f"`{instruction.op}` of {node.label}"


_ADVICE: Mapping[Category, str] = {
    Category.ACTIVATIONS: "activations: Recompute or Offload for regions on it, Split into more (smaller) microbatches, or a schedule "
    "that has fewer of them in flight",
    Category.PARAMETERS: "parameters: Replicate(..., shard_params=True) over more devices, or more pipeline stages",
    Category.SHARDS: "slices of parameters: more replicas, or more pipeline stages",
    Category.OPTIMIZER: "optimizer state: Replicate(..., shard_optimizer=True) over more devices, or another optimizer",
    Category.GRADIENTS: "gradients: Replicate(..., shard_grads=True) over more devices, or more pipeline stages",
    Category.GATHERED: "gathered parameters: annotate smaller regions, so that less of the model is whole at a time",
    Category.COMMUNICATION: "communication in flight: a smaller bucket_size, smaller microbatches, or lower receive_bytes where given",
    Category.BUFFERS: "buffers: more pipeline stages",
}


_LEVEL = {Category.OPTIMIZER: Level.OPTIMIZER, Category.GRADIENTS: Level.GRADIENTS}
"""From which level on a category is sharded already."""

_SHARDED = {
    Category.OPTIMIZER: "optimizer state: more replicas, more pipeline stages, or another optimizer",
    Category.GRADIENTS: "gradients: more replicas, more pipeline stages, or smaller buckets",
}


def _advice(plan: Plan, parts: Sequence[tuple[Category, int]]) -> list[str]:
    """What to do about the categories that matter, the largest first."""
    total = sum(n for _, n in parts)
    large = [c for c, n in parts if 10 * n >= total]
    level = min((r.level for r in plan.dag.replications), default=Level.NONE)
    found = [_SHARDED[c] if level >= _LEVEL.get(c, level + 1) else _ADVICE[c] for c in large]
    if plan.microbatch_size > 1 and Category.ACTIVATIONS not in large:
        found.append("activations within a chunk: Split into more (smaller) microbatches")
    return found


def _devices(devices: Sequence[DeviceId]) -> str:
    shown = ", ".join(map(str, devices[:8]))
    return f"{shown}, …" if len(devices) > 8 else shown
