"""An event is recorded once, by an instruction that comes before every wait for it."""

from collections.abc import Iterator

from piper.verify.trace import Problem, Subject

CHECK = "events"


def check_events(subject: Subject) -> Iterator[Problem]:
    """Problems in issue order, device by device."""
    for trace in subject.traces:
        device, recorders = trace.device, trace.recorders
        for i, instruction in enumerate(trace.instructions):
            event = instruction.record
            awaited = instruction.awaits()
            if awaited is not None:
                if trace.waits[i] < 0:
                    yield Problem(
                        CHECK,
                        f"{subject.at(device, i)}: event e{awaited} is not recorded by "
                        "an earlier instruction",
                    )
                if event is not None:
                    yield Problem(CHECK, f"{subject.at(device, i)}: a wait cannot record an event")
            elif event is not None and recorders[event] != i:
                yield Problem(
                    CHECK,
                    f"{subject.at(device, i)}: event e{event} is recorded already by "
                    f"{subject.at(device, recorders[event])}",
                )
