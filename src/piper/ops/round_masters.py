"""Bring what chunks read up to date with the master copies that were updated."""

from collections.abc import Callable, Sequence

from piper.ids import Slot
from piper.ops.base import (
    Handle,
    Instruction,
    LocalWork,
    NodeShape,
    Runtime,
    Site,
    filled,
    instruction,
    work,
)


@work
class RoundMasters(LocalWork, frozen=True):
    """Overwrite the parameters ``names`` by their master copies, one whole one per name, rounded to
    the parameters' element type.
    """

    def flaws(self, node: NodeShape) -> list[str]:
        if node.inputs < len(self.names) or node.outputs or len(set(self.names)) != len(self.names):
            return [
                f"{len(self.names)} names do not fit {node.inputs} inputs and {node.outputs} outputs"
            ]
        return []

    names: tuple[str, ...]

    def overwrites(self) -> tuple[tuple[str, str], ...]:
        return tuple(("parameter", name) for name in self.names)

    def lower(self, site: Site) -> Instruction:
        return StoreRounded(
            node=site.node, stream=site.stream, masters=site.inputs, parameters=site.outputs
        )


@instruction
class StoreRounded(Instruction, frozen=True, kw_only=True):
    """For each i: overwrite ``parameters[i]`` by ``masters[i]``, rounded."""

    masters: tuple[Slot, ...]
    parameters: tuple[Slot, ...]

    def flaws(self) -> Sequence[str]:
        lengths = (len(self.masters), len(self.parameters))
        return () if len(set(lengths)) == 1 else [f"masters and parameters have lengths {lengths}"]

    def reads(self) -> tuple[Slot, ...]:
        return self.masters

    def writes(self) -> tuple[Slot, ...]:
        return self.parameters

    def bind(self, runtime: Runtime) -> Callable[[], Handle | None]:
        slots, device = runtime.slots, runtime.device
        pairs = tuple(zip(self.parameters, self.masters, strict=True))

        def run() -> None:
            for parameter, master in pairs:
                device.copy_(filled(slots[parameter]), filled(slots[master]))

        return run

    def describe(self) -> str:
        stored = (f"%{p} = %{m}" for p, m in zip(self.parameters, self.masters, strict=True))
        return f"store_rounded {', '.join(stored)}"
