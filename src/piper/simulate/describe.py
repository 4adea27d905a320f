"""What people call an instruction."""

from dataclasses import dataclass

from piper.ops.base import Instruction
from piper.ops.compute import Compute
from piper.plan.model import Plan


@dataclass(frozen=True, slots=True)
class Described:
    """What people call an instruction, and where it belongs; the fields are those of
    :class:`~piper.simulate.timeline.Box`.
    """

    label: str
    pass_: str
    tags: tuple[tuple[str, int], ...]
    microbatch: int | None


def describe(plan: Plan, instruction: Instruction) -> Described:
    """The node of *instruction* for people; its own name where it comes from none."""
    node = plan.dag.nodes.get(instruction.node)
    if node is None:
        return Described(instruction.op, "", (), None)
    microbatch = plan.dag.microbatch(node.tags) if plan.dag.is_split(node.tags) else None
    return Described(_label(instruction, node.label), node.pass_.value, node.tags, microbatch)


def _label(instruction: Instruction, label: str) -> str:
    """``send F PP=0 MB=1``, ``accumulate B PP=0 MB=1``; collectives and chunks as the DAG calls
    them.
    """
    meeting = instruction.rendezvous()
    if isinstance(instruction, Compute):
        return label
    if meeting is None:
        return f"{instruction.op} {label}"
    if meeting.role in ("send", "receive"):
        return f"{meeting.role} {label.removeprefix('transfer ')}"
    return label
