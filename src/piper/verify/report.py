"""What was verified, in numbers."""

from collections import Counter
from dataclasses import dataclass

from piper.verify.trace import Subject


@dataclass(frozen=True, slots=True)
class Report:
    """Counts over a verified plan. ``messages`` counts each message once, ``collectives`` each
    collective once. Of a folded plan, ``instructions``, ``waits`` and ``streams`` are those of the
    devices that have a program.
    """

    devices: int
    nodes: int
    instructions: int
    messages: int
    collectives: int
    waits: int
    streams: int
    parameters: int

    @classmethod
    def of(cls, subject: Subject) -> "Report":
        """Count *subject*."""
        roles: Counter[str] = Counter()
        members = 0.0
        alike = {role[0]: len(role) for role in subject.plan.represented()}
        for trace in subject.traces:
            for meeting in trace.meetings:
                if meeting is not None:
                    roles[meeting.role] += alike[trace.device]
                    if meeting.role not in ("send", "receive"):
                        members += alike[trace.device] / len(meeting.members)
        return cls(
            devices=len(subject.traces),
            nodes=len(subject.dag.nodes),
            instructions=sum(len(t.instructions) for t in subject.traces),
            messages=roles["send"],
            collectives=round(members),
            waits=sum(w >= 0 for t in subject.traces for w in t.waits),
            streams=sum(len(t.stream_names) for t in subject.traces),
            parameters=sum(1 for c in subject.dag.contributions.values() if c),
        )

    def __str__(self) -> str:
        return (
            f"verified: {self.nodes} nodes on {self.devices} devices in {self.instructions} "
            f"instructions; {self.messages} messages and {self.collectives} collectives match, "
            f"without deadlock; {self.waits} waits order {self.streams} streams; "
            f"{self.parameters} parameters get every contribution once"
        )
