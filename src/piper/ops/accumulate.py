"""Sum contributions: to a parameter's gradient, or to the weight of a weighted loss."""

from collections.abc import Callable

from piper.ids import Slot
from piper.ops.base import Handle, Instruction, Runtime, Work, instruction, work


@work
class Sum(Work, frozen=True):
    """Each output is the sum of ``len(inputs) / len(outputs)`` consecutive inputs.

    Lowered to one :class:`Accumulate` per contribution after the first, right after the chunk that made it.
    """


@instruction
class Accumulate(Instruction, frozen=True, kw_only=True):
    """For each i: ``totals[i] = left[i] + right[i]``; in place where ``totals[i] == left[i]``.

    The first sum of two contributions makes a new tensor: contributions may share memory with other values.
    """

    totals: tuple[Slot, ...]
    left: tuple[Slot, ...]
    right: tuple[Slot, ...]

    def reads(self) -> tuple[Slot, ...]:
        return self.left + self.right

    def writes(self) -> tuple[Slot, ...]:
        return self.totals

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device = runtime.slots, runtime.device
        triples = tuple(zip(self.totals, self.left, self.right, strict=True))

        def run() -> None:
            for total, left, right in triples:
                a, b = slots[left], slots[right]
                assert a is not None
                assert b is not None
                if total == left:
                    device.add_(a, b)
                else:
                    slots[total] = device.add(a, b)

        return run

    def describe(self) -> str:
        sums = (
            f"%{t} = %{a} + %{b}"
            for t, a, b in zip(self.totals, self.left, self.right, strict=True)
        )
        return f"accumulate {', '.join(sums)}"
