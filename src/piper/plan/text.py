"""Plans and DAGs as text, for people and golden files."""

from collections.abc import Iterator

from piper.ids import NodeId
from piper.ir.dag import Comm, Dag, Node
from piper.ops.compute import Compute
from piper.plan.model import DevicePlan, Plan


def dag_text(dag: Dag) -> str:
    """One line per node: id, label, devices, inputs → outputs; then the order edges and overlap
    groups that directives stated.
    """
    lines = [
        f"{node.id:>4} {node.label:<32} @{_devices(node)} "
        f"({', '.join(map(str, node.inputs))}) -> ({', '.join(map(str, node.outputs))})"
        for node in dag.nodes.values()
    ]
    lines += [f"order {e.before} < {e.after}" for e in dag.order]
    lines += [f"overlap {' '.join(map(str, o.nodes))}" for o in dag.overlaps]
    return "\n".join(lines) + "\n"


def plan_text(plan: Plan) -> str:
    """Every device's program, one line per instruction: number, stream, event, what it does, node,
    the number of its overlap group.
    """
    return "\n".join("\n".join(_device_lines(plan, device)) for device in plan.devices) + "\n"


def _device_lines(plan: Plan, device: DevicePlan) -> Iterator[str]:
    yield f"device {device.device}"
    groups = _overlap_of(plan.dag)
    for number, instruction in enumerate(device.instructions):
        event = "" if instruction.record is None else f"e{instruction.record}"
        node = plan.dag.nodes.get(instruction.node)
        label = "" if node is None else f"  # {node.label}"
        if isinstance(instruction, Compute) and instruction.node in groups:
            label += f" [overlap {groups[instruction.node]}]"
        yield f"  {number:>4} {instruction.stream:<12} {event:<5} {instruction.describe()}{label}"


def overlap_text(plan: Plan) -> str:
    """How each device interleaves the chunks of each overlap group, and in brackets what it
    communicates meanwhile; one line per device and group. Empty if no order asks for overlap.
    """
    lines: list[str] = []
    for device in plan.devices:
        groups = _overlap_of(plan.dag)
        places: dict[int, list[int]] = {}
        for i, instruction in enumerate(device.instructions):
            if isinstance(instruction, Compute) and instruction.node in groups:
                places.setdefault(groups[instruction.node], []).append(i)
        for number, mine in places.items():
            between = device.instructions[mine[0] : mine[-1] + 1]
            steps = [
                label if isinstance(i, Compute) else f"[{label}]"
                for i in between
                if (isinstance(i, Compute) and groups.get(i.node) == number) or i.rendezvous()
                for label in [plan.dag.nodes[i.node].label]
            ]
            where = plan.dag.overlaps[number].directive
            lines.append(
                f"device {device.device} overlap {number} (directive {where}): {', '.join(steps)}"
            )
    return "".join(f"{line}\n" for line in lines)


def _overlap_of(dag: Dag) -> dict[NodeId, int]:
    """The number of each chunk's overlap group: the first that names it."""
    found: dict[NodeId, int] = {}
    for number, overlap in enumerate(dag.overlaps):
        for node in overlap.nodes:
            found.setdefault(node, number)
    return found


def _devices(node: Node) -> str:
    groups = node.groups if isinstance(node, Comm) else (node.devices or ("-",),)
    return " ".join(",".join(map(str, group)) for group in groups)
