"""What the length of a step is made of: the critical path, and what on it would pay to shorten."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from piper.ids import NodeId
from piper.plan.model import Plan
from piper.simulate.describe import describe
from piper.simulate.engine import NOTHING, Place, Run
from piper.simulate.timeline import Critical, Timeline


def critical_path(plan: Plan, run: Run) -> tuple[Critical, ...]:
    """The chain that ends with the last instruction, first to last; waits and frees are left
    out.
    """
    if not run.end:
        return ()
    place = max(range(len(run.end)), key=lambda p: (run.end[p], -p))
    links: list[Critical] = []
    for step in _back(run, place):
        instruction, device = run.instructions[step], run.device[step]
        works = instruction.reads() or instruction.writes()
        if not works or run.end[step] <= run.start[step]:
            continue
        links.append(
            Critical(
                device=device,
                position=step - run.offsets[device],
                node=instruction.node,
                label=describe(plan, instruction).label,
                op=instruction.op,
                start=run.start[step],
                end=run.end[step],
            )
        )
    return tuple(reversed(links))


def _back(run: Run, place: Place) -> Iterator[Place]:
    """*place*, what it waited for, what that waited for, and so on; one member for each rendezvous,
    the last that came.
    """
    while place != NOTHING:
        cause = run.cause[place]
        if cause != NOTHING and run.meeting[cause] == run.meeting[place] != NOTHING:
            place = cause
            continue
        yield place
        place = cause


def waited_on(run: Run, place: Place) -> tuple[NodeId, ...]:
    """The nodes whose completion let the instruction at *place* start: the last that it needed
    itself, and for a rendezvous with a later peer, the last that the peer needed.
    """
    return tuple(
        dict.fromkeys(run.instructions[p].node for p in _sources(run, place) if p != NOTHING)
    )


def _sources(run: Run, place: Place) -> Iterator[Place]:
    cause = run.cause[place]
    if cause != NOTHING and run.meeting[cause] == run.meeting[place] != NOTHING:
        cause = run.cause[cause]
    # What takes no time (a wait) passes on what it waited for.
    while cause != NOTHING and run.end[cause] <= run.start[cause]:
        cause = run.cause[cause]
    yield cause


@dataclass(frozen=True, slots=True)
class Share:
    """What some boxes of one kind contribute to the critical path: seconds, how many, on which
    devices.
    """

    what: str
    seconds: float
    count: int
    devices: tuple[int, ...]


def shares(timeline: Timeline, top: int | None = None) -> Sequence[Share]:
    """The critical path by kind of work (pass and region, microbatches together), the longest
    first: what to improve first.
    """
    seconds: dict[str, float] = {}
    count: dict[str, int] = {}
    devices: dict[str, dict[int, None]] = {}
    for link in timeline.critical_path:
        what = _regions(link.label, timeline.splits)
        seconds[what] = seconds.get(what, 0.0) + link.end - link.start
        count[what] = count.get(what, 0) + 1
        devices.setdefault(what, {})[link.device] = None
    found = [Share(w, seconds[w], count[w], tuple(sorted(devices[w]))) for w in seconds]
    return sorted(found, key=lambda share: -share.seconds)[:top]


def _regions(label: str, splits: Sequence[str]) -> str:
    """A label without its split dimensions."""
    return " ".join(word for word in label.split() if word.partition("=")[0] not in splits)
