"""Plans and DAGs as text, for people and golden files."""

from collections.abc import Iterator

from piper.ir.dag import Comm, Dag, Node
from piper.plan.model import DevicePlan, Plan


def dag_text(dag: Dag) -> str:
    """One line per node: id, label, devices, inputs → outputs; then the order edges that directives stated."""
    lines = [
        f"{node.id:>4} {node.label:<32} @{_devices(node)} "
        f"({', '.join(map(str, node.inputs))}) -> ({', '.join(map(str, node.outputs))})"
        for node in dag.nodes.values()
    ]
    lines += [f"order {e.before} < {e.after}" for e in dag.order]
    return "\n".join(lines) + "\n"


def plan_text(plan: Plan) -> str:
    """Every device's program, one line per instruction: number, stream, event, what it does, node."""
    return "\n".join("\n".join(_device_lines(plan, device)) for device in plan.devices) + "\n"


def _device_lines(plan: Plan, device: DevicePlan) -> Iterator[str]:
    yield f"device {device.device}"
    for number, instruction in enumerate(device.instructions):
        event = "" if instruction.record is None else f"e{instruction.record}"
        node = plan.dag.nodes.get(instruction.node)
        label = "" if node is None else f"  # {node.label}"
        yield f"  {number:>4} {instruction.stream:<12} {event:<5} {instruction.describe()}{label}"


def _devices(node: Node) -> str:
    groups = node.groups if isinstance(node, Comm) else (node.devices or ("-",),)
    return " ".join(",".join(map(str, group)) for group in groups)
