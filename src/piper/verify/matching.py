"""The k-th message or collective on a communicator is the same one on every member.

Messages and collectives of one communicator pair up by order alone, so a swap on one side would
deliver the wrong value without an error.
"""

from collections.abc import Iterator
from itertools import zip_longest

from piper.ids import DeviceId
from piper.ops.base import CommunicatorId
from piper.verify.trace import Problem, Subject, table

CHECK = "matching"


def check_matching(subject: Subject) -> Iterator[Problem]:
    """Problems: the first mismatch of each communicator, and communicators used on several streams
    of a device.
    """
    for name, members in positions(subject).items():
        yield from _one_stream(subject, name, members)
        yield from _pair_up(subject, name, members)


def positions(subject: Subject) -> dict[CommunicatorId, dict[DeviceId, list[int]]]:
    """Per communicator and member, the instructions that use it, in issue order."""
    used: dict[CommunicatorId, dict[DeviceId, list[int]]] = {
        info.name: {member: [] for member in info.members if member in subject.present}
        for info in subject.plan.communicators
    }
    for trace in subject.traces:
        device = trace.device
        for i, meeting in enumerate(trace.meetings):
            if meeting is not None:
                used[meeting.communicator][device].append(i)
    return used


def _one_stream(
    subject: Subject, name: CommunicatorId, members: dict[DeviceId, list[int]]
) -> Iterator[Problem]:
    for device, mine in members.items():
        trace = subject.traces[device]
        streams = {trace.streams[i] for i in mine}
        if len(streams) > 1:
            names = sorted(trace.stream_names[s] for s in streams)
            yield Problem(
                CHECK,
                f"device {device} uses communicator {name!r} on several streams, {names}: "
                "the order of its messages is not defined",
            )


def _pair_up(
    subject: Subject, name: CommunicatorId, members: dict[DeviceId, list[int]]
) -> Iterator[Problem]:
    devices = list(members)
    traces = [subject.traces[d] for d in devices]
    for k, column in enumerate(zip_longest(*members.values(), fillvalue=-1)):
        if _agree(subject, devices, column):
            continue
        rows = []
        for device, trace, i in zip(devices, traces, column, strict=True):
            if i < 0:
                rows.append((str(device), "–", "nothing", "", ""))
                continue
            meeting = trace.meetings[i]
            assert meeting is not None
            sizes = ", ".join(f"{m.dtype}{list(m.shape)}" for m in meeting.messages)
            node = trace.instructions[i].node
            text = subject.at(device, i).split(" ", 3)[-1]
            rows.append((str(device), f"#{i}", text, f"node {node}", sizes))
        head = ("device", "at", "instruction", "", "carries")
        yield Problem(
            CHECK,
            f"number {k} on communicator {name!r} is not the same on all members:\n"
            + table(head, rows),
        )
        return


def _agree(subject: Subject, devices: list[DeviceId], column: tuple[int, ...]) -> bool:
    """Whether one member's instructions each (-1: none) meet."""
    first = subject.traces[devices[0]]
    i = column[0]
    if i < 0:
        return False
    one = first.meetings[i]
    assert one is not None
    node = first.instructions[i].node
    for device, j in zip(devices[1:], column[1:], strict=True):
        if j < 0:
            return False
        trace = subject.traces[device]
        other = trace.meetings[j]
        assert other is not None
        if other.messages != one.messages or trace.instructions[j].node != node:
            return False
        if other.role != one.role and {one.role, other.role} != {"send", "receive"}:
            return False
        if other.role == one.role == "send" or other.role == one.role == "receive":
            return False
    return True
