"""Random strategies for a model: placements, replicas, microbatches, and orders that are legal by
construction.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

import piper
from piper.directives.base import Directive
from piper.ids import DeviceId
from piper.ir.dag import Chunk, Dag
from piper.ir.select import FilterValue

Filter = dict[str, FilterValue]


@dataclass(frozen=True)
class Recipe:
    """How to make a strategy.

    ``homes[i]`` is the group of region i modulo its length; ``parity`` moves odd microbatches'
    regions to the next group; ``order_seed`` chooses an order for each device (``None``: none);
    ``halves`` splits all backwards.
    """

    homes: tuple[int, ...]
    replicas: int
    microbatches: int
    rows: int
    split_first: bool
    parity: bool
    order_seed: int | None
    halves: bool

    @property
    def batch_size(self) -> int:
        return self.replicas * self.microbatches * self.rows


recipes = st.builds(
    Recipe,
    homes=st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple),
    replicas=st.sampled_from((1, 1, 2)),
    microbatches=st.integers(1, 4),
    rows=st.integers(1, 2),
    split_first=st.booleans(),
    parity=st.booleans(),
    order_seed=st.none() | st.integers(0, 1000),
    halves=st.booleans(),
)


def directives(recipe: Recipe, regions: Sequence[int | None]) -> list[Directive]:
    """Everything but the order. A region's home is a device group; outside all regions is a region
    of its own.
    """
    split = piper.Split({}, num_microbatches=recipe.microbatches)
    replicate = [piper.Replicate({}, devices="placed")] if recipe.replicas > 1 else []
    halves = [piper.Order([[{"PASS": ["BI", "BW"]}]])] if recipe.halves else []
    places = list(_places(recipe, regions))
    if recipe.parity or recipe.split_first:
        return [split, *places, *halves, *replicate]
    return [*places, *replicate, *halves, split]


def _places(recipe: Recipe, regions: Sequence[int | None]) -> Iterator[Directive]:
    """Groups are numbered without gaps, in the order in which they are first used."""
    groups: dict[int, int] = {}

    def devices(home: int) -> list[int]:
        first = groups.setdefault(home, len(groups)) * recipe.replicas
        return list(range(first, first + recipe.replicas))

    even, odd = range(0, recipe.microbatches, 2), range(1, recipe.microbatches, 2)
    for region in regions:
        number = len(recipe.homes) - 1 if region is None else region
        home = recipe.homes[number % len(recipe.homes)]
        if not recipe.parity:
            yield piper.Place({"PP": region}, devices=devices(home))
            continue
        yield piper.Place({"PP": region, "MB": list(even)}, devices=devices(home))
        if odd:
            yield piper.Place({"PP": region, "MB": list(odd)}, devices=devices((home + 1) % 3))


def orders(dag: Dag, seed: int) -> tuple[list[Directive], bool]:
    """Per device the chunks in the order of one random linear extension of *dag*; whether every
    filter means one chunk.

    If every filter means one chunk the order is legal for certain.
    """
    choose = random.Random(seed)
    sequences: dict[DeviceId, dict[tuple[tuple[str, FilterValue], ...], int]] = {}
    names = sorted({name for chunk in dag.chunks() for name, _ in chunk.tags})
    for node in _extension(dag, choose):
        chunk = dag.nodes[node]
        if isinstance(chunk, Chunk) and not chunk.derived:
            tags: Filter = {name: dict(chunk.tags).get(name) for name in names}
            key = tuple({**tags, "PASS": chunk.pass_.value}.items())
            steps = sequences.setdefault(chunk.participants[0], {})
            steps[key] = steps.get(key, 0) + 1
    single = all(count == 1 for steps in sequences.values() for count in steps.values())
    made: list[Directive] = [
        piper.Order([[dict(key)] for key in steps]) for steps in sequences.values() if steps
    ]
    return made, single


def _extension(dag: Dag, choose: random.Random) -> list[int]:
    waiting = {node: len(before) for node, before in dag.predecessors.items()}
    ready = [node for node, count in waiting.items() if not count]
    order: list[int] = []
    while ready:
        node = ready.pop(choose.randrange(len(ready)))
        order.append(node)
        for after in dag.successors[node]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return order
