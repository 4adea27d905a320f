"""Timelines to draw, made without a plan: pipelines on which every chunk takes a whole number of
milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.schedules.unit_time import chunks

from piper.directives.order import Order
from piper.ids import COMPUTE, DeviceId, NodeId, Stream
from piper.simulate.timeline import (
    VERSION,
    Box,
    Critical,
    DeviceTimeline,
    Lane,
    MemoryCurve,
    Source,
    Timeline,
    busy_and_exposed,
)

MILLISECOND = 1e-3
MIB = 2**20
LENGTHS = {"F": 2.0, "B": 4.0, "BI": 2.0, "BW": 2.0, "UPDATE": 1.0}

Key = tuple[str, int, int]
"""What runs: pass, stage, microbatch."""


@dataclass
class Job:
    """One node: what it runs after, and its boxes, one for each of its places (device, stream)."""

    node: int
    label: str
    op: str
    pass_: str
    tags: tuple[tuple[str, int], ...]
    length: float
    places: list[tuple[int, str]]
    after: list[int] = field(default_factory=list)
    nbytes: int = 0
    flops: float = 0.0
    start: float = 0.0
    before: tuple["Job", ...] = ()
    waits_on: tuple[int, ...] = ()

    @property
    def end(self) -> float:
        return self.start + self.length


class Builder:
    """Collects nodes in an order in which each comes after what it needs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.free: dict[tuple[int, str], Job] = {}

    def add(self, job: Job) -> int:
        before = [self.jobs[i] for i in job.after]
        before += [self.free[p] for p in job.places if p in self.free]
        job.before = tuple(before)
        job.start = max((b.end for b in before), default=0.0)
        job.waits_on = tuple(sorted({b.node for b in before if b.end == job.start}))
        self.free.update(dict.fromkeys(job.places, job))
        self.jobs.append(job)
        return job.node


def pipeline(
    orders: Sequence[Order],
    *,
    stages: int,
    split: bool = False,
    replicas: int = 1,
    scale: float = 1.0,
    source: Source = Source.SIMULATED,
) -> Timeline:
    """The step that *orders* (one per rank, see :mod:`piper.schedules`) make on ``len(orders) *
    replicas`` devices.

    Stage s is on rank s mod R. Neighbours exchange activations and gradients on streams of their
    own; the replicas of a rank reduce their gradients at the end, and update. *split*: a backward
    in two halves, one after the other.
    """
    ranks = [chunks(order) for order in orders]
    builder, made = Builder(), dict[Key, int]()
    left = [list(sequence) for sequence in ranks]
    while any(left):
        ready = [
            r for r, sequence in enumerate(left) if sequence and _ready(sequence[0], made, stages)
        ]
        assert ready, "the orders wait for each other"
        for rank in ready:
            _chunk(
                builder, made, left[rank].pop(0), len(ranks), replicas, split=split, stages=stages
            )
    for rank in range(len(ranks)):
        _update(builder, made, rank, len(ranks), replicas, stages)
    return _timeline(builder.jobs, len(ranks) * replicas, scale * MILLISECOND, source)


def _ready(chunk: Key, made: dict[Key, int], stages: int) -> bool:
    pass_, stage, mb = chunk
    if pass_ == "F":
        return stage == 0 or ("F", stage - 1, mb) in made
    return ("F", stage, mb) in made and (stage == stages - 1 or ("B", stage + 1, mb) in made)


def _chunk(builder, made, chunk: Key, ranks: int, replicas: int, *, split: bool, stages: int):
    pass_, stage, mb = chunk
    tags = (("PP", stage), ("MB", mb))
    rank = stage % ranks
    devices = [rank * replicas + i for i in range(replicas)]
    source = stage - 1 if pass_ == "F" else stage + 1
    after = [made[pass_, source, mb]] if 0 <= source < stages else []
    if after and source % ranks != rank:
        peers = [(source % ranks) * replicas + i for i in range(replicas)]
        link = "act" if pass_ == "F" else "grad"
        after = [
            builder.add(
                Job(
                    node=len(builder.jobs),
                    label=f"{pass_} transfer PP={source} MB={mb}",
                    op="send",
                    pass_=pass_,
                    tags=(("PP", source), ("MB", mb)),
                    length=0.5,
                    places=[
                        *((p, f"send.{link}") for p in peers),
                        *((d, f"receive.{link}") for d in devices),
                    ],
                    after=after,
                    nbytes=8 * MIB,
                )
            )
        ]
    if pass_ == "B":
        after.append(made["F", stage, mb])
    for part in ("BI", "BW") if pass_ == "B" and split else (pass_,):
        after = [
            builder.add(
                Job(
                    node=len(builder.jobs),
                    label=f"{part} PP={stage} MB={mb}",
                    op="compute",
                    pass_=part,
                    tags=tags,
                    length=LENGTHS[part] + 0.25 * (stage == stages - 1),
                    places=[(d, COMPUTE) for d in devices],
                    after=after,
                    nbytes=64 * MIB,
                    flops=1e9 * LENGTHS[part],
                )
            )
        ]
        if part != "BW":
            made[pass_, stage, mb] = after[0]


def _update(builder, made, rank: int, ranks: int, replicas: int, stages: int) -> None:
    devices = [rank * replicas + i for i in range(replicas)]
    after = [
        node for (pass_, stage, _), node in made.items() if pass_ == "B" and stage % ranks == rank
    ]
    if replicas > 1:
        places = [(d, "reduce") for d in devices]
        after = [
            builder.add(
                Job(
                    len(builder.jobs),
                    f"all_reduce PP={rank}",
                    "all_reduce",
                    "",
                    (("PP", rank),),
                    1.5,
                    places,
                    after,
                    nbytes=32 * MIB,
                )
            )
        ]
    places = [(d, COMPUTE) for d in devices]
    builder.add(
        Job(
            len(builder.jobs),
            f"update PP={rank}",
            "optimizer_step",
            "UPDATE",
            (("PP", rank),),
            1.0,
            places,
            after,
            nbytes=96 * MIB,
        )
    )


def _timeline(jobs: list[Job], num_devices: int, unit: float, source: Source) -> Timeline:
    total = max(job.end for job in jobs)
    path = _critical(jobs)
    lanes: dict[tuple[int, str], list[Box]] = {}
    position: dict[tuple[int, int, str], int] = {}
    counts = [0] * num_devices
    for job in sorted(jobs, key=lambda job: (job.start, job.node)):
        for device, stream in job.places:
            position[job.node, device, stream] = counts[device]
            meets = job.op in {"send", "all_reduce"}
            # One message per replica; a collective has all of them.
            replica = device % max(1, len(job.places) // 2) if job.op == "send" else 0
            lanes.setdefault((device, stream), []).append(
                Box(
                    position=counts[device],
                    node=NodeId(job.node),
                    op=("send" if stream.startswith("send") else "receive")
                    if job.op == "send"
                    else job.op,
                    label=job.label,
                    pass_=job.pass_,
                    tags=job.tags,
                    microbatch=dict(job.tags).get("MB"),
                    start=job.start * unit,
                    end=job.end * unit,
                    nbytes=job.nbytes,
                    flops=job.flops,
                    waits_on=tuple(map(NodeId, job.waits_on)),
                    critical=job.node in path,
                    meeting=f"{job.op}:{job.node}:{replica}" if meets else "",
                    needs=_needs(job, device, position),
                )
            )
            counts[device] += 1
    devices = tuple(
        _device(
            d,
            [
                Lane(Stream(s), tuple(boxes))
                for (e, s), boxes in sorted(lanes.items(), key=lambda x: (x[0][1] != COMPUTE, x[0]))
                if e == d
            ],
            total * unit,
        )
        for d in range(num_devices)
    )
    critical = tuple(
        Critical(
            DeviceId(job.places[0][0]),
            position[job.node, *job.places[0]],
            NodeId(job.node),
            job.label,
            job.op,
            job.start * unit,
            job.end * unit,
        )
        for job in jobs
        if job.node in path
    )
    flops = sum(box.flops for d in devices for box in d.boxes())
    return Timeline(
        VERSION, source, total * unit, num_devices, ("MB",), flops, 0.41, devices, critical
    )


def _needs(job: Job, device: int, position) -> tuple[tuple[DeviceId, int], ...]:
    """What *job* came after, where it has a box on *device*."""
    keys = {(b.node, d, stream) for b in job.before for d, stream in b.places if d == device}
    return tuple((DeviceId(device), position[key]) for key in sorted(keys))


def _device(number: int, lanes: list[Lane], seconds: float) -> DeviceTimeline:
    memory = _memory(lanes)
    stacked = [sum(values) for values in zip(*memory.nbytes.values(), strict=True)]
    at = stacked.index(max(stacked))
    return DeviceTimeline(
        DeviceId(number),
        (DeviceId(number),),
        tuple(lanes),
        memory,
        *busy_and_exposed(lanes, seconds),
        peak=stacked[at],
        peak_by_category={name: values[at] for name, values in memory.nbytes.items()},
    )


def _memory(lanes: list[Lane]) -> MemoryCurve:
    """Parameters, optimizer state, and the activations that forwards leave to their backwards."""
    steps = [(0.0, 0)]
    for box in sorted((b for lane in lanes for b in lane.boxes), key=lambda b: b.end):
        change = {"F": 48 * MIB, "B": -48 * MIB, "BI": -16 * MIB, "BW": -32 * MIB}.get(box.pass_, 0)
        if box.op == "compute":
            steps.append((box.end, steps[-1][1] + change))
    return MemoryCurve(
        tuple(time for time, _ in steps),
        {
            "parameters": (64 * MIB,) * len(steps),
            "optimizer": (128 * MIB,) * len(steps),
            "activations": tuple(nbytes for _, nbytes in steps),
        },
    )


def _critical(jobs: list[Job]) -> set[int]:
    """The nodes of one longest chain."""
    job = max(jobs, key=lambda job: job.end)
    found = {job.node}
    while job.waits_on:
        job = jobs[job.waits_on[0]]
        found.add(job.node)
    return found
