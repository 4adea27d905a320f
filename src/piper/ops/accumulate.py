"""Sum contributions: to a parameter's gradient, or to the weight of a weighted loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, NodeShape, Runtime, Work, filled, instruction, work
from piper.ops.storage import Storages


@work
class Sum(Work, frozen=True):
    """Each output is the sum of ``len(inputs) / len(outputs)`` consecutive inputs.

    Lowered to one :class:`Accumulate` per contribution after the first, right after the chunk that
    made it.
    """

    instant: ClassVar[bool] = True
    communicates: ClassVar[bool] = False

    def flaws(self, node: NodeShape) -> list[str]:
        if node.outputs < 1 or node.inputs < node.outputs or node.inputs % node.outputs:
            return [
                f"a sum has the same number of inputs for each output, found {node.inputs} and {node.outputs}"
            ]
        return []


@instruction
class Accumulate(Instruction, frozen=True, kw_only=True):
    """For each i: ``totals[i] = left[i] + right[i]``; in place where ``totals[i] == left[i]``.

    The first sum of two contributions makes a new tensor, since contributions may share memory with
    other values. Where ``left[i]`` is one of ``moved`` it does not: it is added to, becomes
    ``totals[i]``, and its slot is empty from then on.
    """

    totals: tuple[Slot, ...]
    left: tuple[Slot, ...]
    right: tuple[Slot, ...]
    moved: tuple[Slot, ...] = ()

    def flaws(self) -> Sequence[str]:
        lengths = (len(self.totals), len(self.left), len(self.right))
        if len(set(lengths)) != 1:
            return [f"totals, left and right have lengths {lengths}"]
        pairs = zip(self.totals, self.left, strict=True)
        kept = {left for total, left in pairs if total != left}
        if stray := sorted(set(self.moved) - kept):
            return [f"moves {stray}, which it does not add to another slot"]
        return ()

    def reads(self) -> tuple[Slot, ...]:
        return self.left + self.right

    def writes(self) -> tuple[Slot, ...]:
        return self.totals

    def frees(self) -> tuple[Slot, ...]:
        return self.moved

    def place(self, memory: Storages) -> None:
        for total, left in zip(self.totals, self.left, strict=True):
            if left in self.moved:
                memory.fill(total, memory.of(left))
                memory.empty(left)
            else:
                memory.make(total)

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        return self.bind_last(runtime, frozenset(), {})

    def bind_last(
        self,
        runtime: Runtime,
        dying: frozenset[Slot],  # noqa: ARG002
        added: Mapping[Slot, Slot],
    ) -> Callable[[], Handle | None]:
        """What the chunk *added* itself is only moved, where it is to be."""
        slots, device = runtime.slots, runtime.device
        moved = frozenset(self.moved)
        quadruples = tuple(
            (total, left, right, left in moved)
            for total, left, right in zip(self.totals, self.left, self.right, strict=True)
            if right not in added
        )
        renamed = tuple(
            (total, left)
            for total, left, right in zip(self.totals, self.left, self.right, strict=True)
            if right in added and left in moved
        )

        def run() -> None:
            for total, left in renamed:
                slots[total], slots[left] = slots[left], None
            for total, left, right, moves in quadruples:
                a, b = filled(slots[left]), filled(slots[right])
                if total != left and not moves:
                    slots[total] = device.add(a, b)
                    continue
                device.add_(a, b)
                if moves:
                    slots[total], slots[left] = a, None

        return run

    def describe(self) -> str:
        sums = (
            f"%{t} = %{a} {'+=' if a in self.moved else '+'} %{b}"
            for t, a, b in zip(self.totals, self.left, self.right, strict=True)
        )
        return f"accumulate {', '.join(sums)}"
