"""From a layout to directives: piper's public names only."""

import random
from collections.abc import Iterator

from tests.random.cases import EXPERTS, IN_A_V, WRITING, Layout, Sketch

import piper

NUM_EXPERTS = 4


def directives(layout: Layout, sketch: Sketch) -> list[object]:
    """The strategy that *layout* means for *sketch*."""
    groups = _groups(layout, sketch)
    experts = [(i, e.region) for i, e in enumerate(sketch.layers) if e.kind in EXPERTS]
    apart = bool(experts) and layout.shard in ("subset", "superset", "disjoint")
    places = list(_places(layout, sketch, groups, {r for _, r in experts} if apart else set()))
    split = [piper.Split({}, num_microbatches=layout.microbatches)]
    by_microbatch = layout.parity or layout.schedule == "dualpipe"
    replicates = list(_replicates(layout, sketch, groups, places))
    shards = []
    if experts and layout.shard is not None:
        shards = list(_shards(layout, experts, groups, places))
    begin = [*split, *places] if by_microbatch or layout.split_first else [*places]
    made = [*begin, *replicates, *shards]
    if split[0] not in made:
        made += split
    made += _orders(layout, sketch)
    tags = sorted({layer.region for layer in sketch.layers if layer.region is not None})
    made += _regions(piper.Recompute, layout.recompute, tags, layout.save)
    made += _regions(piper.Offload, layout.offload, tags)
    return made


def _regions(directive, chosen, tags, save=False) -> list[object]:
    options = {"save": ["matmul"]} if save and not chosen else {}
    if chosen is None:
        return []
    if not chosen:
        return [directive({}, **options)]
    return [directive({"PP": tag}, **options) for tag in tags if tag in chosen]


def _groups(layout: Layout, sketch: Sketch) -> dict[int | None, list[int]]:
    """The devices of each region (of even microbatches, where that matters)."""
    count = layout.replicas
    regions = sorted({layer.region for layer in sketch.layers}, key=str)
    if layout.schedule == "free":
        numbers: dict[int, int] = {}
        found = {}
        for region in regions:
            home = _home(layout, region)
            first = numbers.setdefault(home, len(numbers)) * count
            found[region] = list(range(first, first + count))
        return found
    ranks = [list(range(count * r, count * (r + 1))) for r in range(layout.ranks)]
    if layout.schedule in IN_A_V:
        there_and_back = [*ranks, *reversed(ranks)]
        return dict(enumerate(there_and_back))
    return {s: ranks[s % layout.ranks] for s in range(sketch.stages)}


def _home(layout: Layout, region: int | None) -> int:
    number = len(layout.homes) - 1 if region is None else region
    return layout.homes[number % len(layout.homes)]


def _places(
    layout: Layout, sketch: Sketch, groups: dict[int | None, list[int]], apart: set[int | None]
) -> Iterator[object]:
    def filters(region):
        return {"PP": region, "EP": None} if region in apart else {"PP": region}

    if layout.parity:
        numbers: dict[int, list[int]] = {}

        def devices(home):
            start = len(numbers) * layout.replicas
            return numbers.setdefault(home, list(range(start, start + layout.replicas)))

        even, odd = (list(range(k, layout.microbatches, 2)) for k in (0, 1))
        for region in groups:
            home = _home(layout, region)
            yield piper.Place({"PP": region, "MB": even}, devices=devices(home))
            if odd:
                yield piper.Place({"PP": region, "MB": odd}, devices=devices((home + 1) % 3))
        return
    if layout.schedule == "dualpipe":
        ranks = [groups[r] for r in range(layout.ranks)]
        yield from piper.placements.two_way(ranks, layout.microbatches)
        return
    for region, group in groups.items():
        yield piper.Place(filters(region), devices=group)


def _replicates(layout, sketch, groups, places) -> Iterator[object]:
    if layout.replicas == 1:
        return
    options = {"bucket_size": layout.bucket, "replicated_buffers": layout.buffers}

    def levels(zero):
        return {
            "shard_optimizer": zero == 1,
            "shard_grads": zero == 2,
            "shard_params": zero == 3,
        }

    where = "placed"
    if layout.hybrid:
        listed = {tuple(p.devices) for p in places}
        where = [list(g[k : k + 2]) for g in sorted(listed) for k in (0, 2)]
    if len(layout.zero) == 1 or layout.hybrid:
        yield piper.Replicate({}, devices=where, **levels(layout.zero[0]), **options)
        return
    for number, region in enumerate(groups):
        zero = layout.zero[number % len(layout.zero)]
        yield piper.Replicate({"PP": region}, **levels(zero), **options)


def _shards(layout, experts, groups, places) -> Iterator[object]:
    used = 1 + max(d for p in places for d in p.devices)
    for number, region in experts:
        own, filter_ = groups[region], {"EP": number}
        others = [d for d in range(used + NUM_EXPERTS) if d not in own]
        if layout.shard == "placed":
            yield piper.Shard(filter_)
        elif layout.shard == "pairs":
            yield piper.Shard(filter_, devices=[own[:2], own[2:]])
        elif layout.shard == "subset":
            yield piper.Shard(filter_, devices=own[: {1: 1, 2: 1, 3: 2, 4: 2}[len(own)]])
        elif layout.shard == "superset":
            count = {1: 2, 2: 4, 3: 4, 4: 4}[len(own)]
            yield piper.Shard(filter_, devices=[*own, *others[: count - len(own)]])
        else:
            yield piper.Shard(filter_, devices=[used, used + 1])


def _orders(layout: Layout, sketch: Sketch) -> list[object]:
    if layout.schedule == "free":
        return [piper.Order([[{"PASS": ["BI", "BW"]}]])] if layout.halves else []
    if layout.schedule == "order":
        return _random_orders(layout, sketch)
    made = piper.strategies.pipeline(
        layout.schedule,
        [[r] for r in range(layout.ranks)],
        layout.microbatches,
        num_virtual_stages=layout.virtual,
    )
    return [d for d in made if isinstance(d, piper.Order)]


def _random_orders(layout: Layout, sketch: Sketch) -> list[object]:
    """Each rank's part of one random order that respects the data."""
    rng = random.Random(layout.order_seed)
    stages, count = sketch.stages, layout.microbatches
    before: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    sequential = sketch.has(*WRITING)
    for m in range(count):
        cut = {s: rng.random() < 0.4 for s in range(stages)}
        last = None
        for s in range(stages):
            before["F", s, m] = [last] if last else []
            if sequential and m:
                before["F", s, m].append(("F", s, m - 1))
            last = ("F", s, m)
        for s in reversed(range(stages)):
            name = "BI" if cut[s] else "B"
            before[name, s, m] = [last]
            last = (name, s, m)
            if cut[s]:
                before["BW", s, m] = [last]
    done: dict[tuple[str, int, int], None] = {}
    while len(done) < len(before):
        ready = [
            s for s, needs in before.items() if s not in done and all(n in done for n in needs)
        ]
        done[rng.choice(ready)] = None
    made = []
    for rank in range(layout.ranks):
        groups: list[list[tuple[str, int, int]]] = []
        for step in done:
            if step[1] % layout.ranks != rank:
                continue
            alone = groups and len(groups[-1]) == 1 and groups[-1][0][2] != step[2]
            if layout.overlap and alone and not sequential and rng.random() < 0.4:
                groups[-1].append(step)
            else:
                groups.append([step])
        made.append(
            piper.Order([[{"PP": s, "MB": m, "PASS": p} for p, s, m in group] for group in groups])
        )
    return made
