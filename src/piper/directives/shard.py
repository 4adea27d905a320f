"""Shard: expert parallelism."""

from collections.abc import Collection
from typing import Literal

from msgspec import field
from msgspec.structs import replace

from piper.directives.base import Directive, directive, matching_chunks
from piper.directives.place import device_lists
from piper.errors import DirectiveError, PlacementError
from piper.ids import NodeId, Stream
from piper.ir.core import core_chunks
from piper.ir.dag import Chunk, Dag, DeviceGroup, Sharding
from piper.ir.edit import Edit, add_sharding, replace_nodes
from piper.ir.experts import Cut, expert_groups, shard_regions
from piper.ir.select import FilterValue, Selector

EXPERT_STREAM = Stream("all_to_all")
"""The stream of the all-to-all unless a directive names another."""


@directive
class Shard(Directive, frozen=True):
    """Expert parallelism: each device of a group holds an equal part of the matched regions'
    experts, and works on the tokens that a number of replicas of the rest of the model have for
    these.

    A region's parameters are cut along dimension 0, the experts. What enters and leaves it is
    exchanged by an all-to-all on ``stream`` (one of its own by default), in the backward too. Two
    forms, told apart by how the region is written:

    * *capacity*: ``x[E, C, d] → [E, C, d']``, equally many tokens for each expert;
    * *dropless*: rows ``[N, d]`` sorted by expert and counts ``[E]`` (int64) ``→ [N, d']``, with the products of
      :func:`piper.grouped_mm`. There is room on each device for all tokens of the group, or, with ``capacity_factor`` f, for f·N: more
      is an error that says by how many.

    The region must work on each expert's tokens alone: operations that mix them are refused, as are
    literal sizes that do not follow from its tensors. Parameters that match a pattern in
    ``replicated`` are held whole by every device.

    ``devices`` is ``"placed"`` (the group that each matched node is on) or a list (which then also
    places nodes that are not placed yet). A list of lists, ``[[0, 1], [2, 3]]``, shards within the
    inner lists and replicates across. A ``Replicate`` of the region, before or after, reduces its
    gradients over the replicas of the same experts only. Matching some chunks of a region matches
    the region.

    The experts' devices need not be those of the nodes around: with the rest on ``[0, 1]``, experts
    may be shared among ``[0, 1]``, ``[2, 3]``, ``[2, 3, 4]`` or ``[0, 1, 2, 3]``. The replicas of
    the rest are dealt out to the lists in equal runs, in order; each list works on the tokens of
    its own. Such a region is placed by this directive (leave it out of every ``Place``), which
    comes after those that place the rest.

    Under a :class:`piper.Precision` the experts' gradients differ from those of one process by a
    rounding of its compute type, because one product over the tokens of several replicas is rounded
    once.

    Before ``Shard({"EP": 0}, devices="placed")`` with everything on ``[0, 1]``, for 8 experts::

        F ──x[8, C, d]──▶ F EP=0 ──y[8, C, d]──▶ F

    After::

        F ──x──▶ all_to_all 0,1 ──x'[4, 2·C, d]──▶ F EP=0 ──y'──▶ all_to_all 0,1 ──y──▶ F

    After ``Shard({"EP": 0}, devices=[1, 2])`` with the rest on ``[0]``::

        F ──x──▶ all_to_all 1,2,0 ──x'[4, C, d]──▶ F EP=0 @1,2 ──y'──▶ all_to_all 1,2,0 ──y──▶ F

    Raises :class:`DirectiveError` for a number of experts that the devices do not divide, a
    parameter without experts, a region that mixes experts or tokens; :class:`PlacementError` for
    devices that are not the region's, and replicas of the rest that the lists do not divide.
    """

    filter: dict[str, FilterValue]
    devices: list[int | list[int]] | Literal["placed"] = "placed"
    stream: str | None = None
    capacity_factor: float | None = None
    replicated: list[str] = field(default_factory=list)

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise DirectiveError(f"capacity_factor is positive, found {self.capacity_factor}")
        tags = {chunk.tags for chunk in matching_chunks(dag, selector, self.filter)}
        lists = self._lists()
        claimed = {
            chunk.id: self._claim(dag, chunk, len(dag.shardings), lists)
            for chunk in core_chunks(dag).values()
            if chunk.tags in tags
        }
        found = {expert_groups(c, lists) for c in claimed.values()}
        counts = {len(g) for groups in found for g in groups}
        if len(counts) > 1 or len({len(groups) for groups in found}) > 1:
            listed = sorted(sorted(map(list, groups)) for groups in found)
            raise PlacementError(
                f"the groups within which experts are sharded must have equal sizes, and every region equally many, found {listed}"
            )
        placed = replace_nodes(dag, claimed).dag
        count, sources = counts.pop(), self._sources(dag, claimed, found.pop())
        if count == 1 and sources in (0, 1):  # nothing to share
            alone: dict[NodeId, Chunk] = {n: replace(c, sharding=None) for n, c in claimed.items()}
            return replace_nodes(dag, alone)
        cut = Cut(count, sources or count, self.capacity_factor, tuple(self.replicated))
        sharded = shard_regions(placed, claimed, cut)
        return add_sharding(
            placed,
            Sharding(number, Stream(self.stream) if self.stream else EXPERT_STREAM, lists, sources),
            sharded.chunks,
            sharded.values,
            sharded.bodies,
        )

    def _sources(
        self, dag: Dag, claimed: Collection[NodeId], groups: Collection[DeviceGroup]
    ) -> int:
        """How many replicas of the rest of the model, as far as it is placed, each of *groups*
        works for; 0 if nothing is.
        """
        rest: dict[int, Chunk] = {}
        for chunk in core_chunks(dag).values():
            if chunk.devices and chunk.sharding is None and chunk.id not in claimed:
                rest.setdefault(len(chunk.devices), chunk)
        if not rest:
            return 0
        if len(rest) > 1:
            one, two = list(rest.values())[:2]
            raise PlacementError(
                f"{one.label!r} on devices {list(one.participants)} and {two.label!r} on {list(two.participants)} have different numbers "
                "of replicas, so that there is no telling how many work with these experts; place everything but expert regions on groups of one size"
            )
        ((replicas, some),) = rest.items()
        if replicas % len(groups):
            raise PlacementError(
                f"{len(groups)} lists of devices, {[list(g) for g in groups]}, cannot share the work for the {replicas} replicas of {some.label!r} "
                f"(on devices {list(some.participants)}) equally; use a number of lists that divides {replicas}"
            )
        return replicas // len(groups)

    def _lists(self) -> tuple[DeviceGroup, ...]:
        """The lists of ``devices``; empty for ``"placed"``."""
        return () if self.devices == "placed" else device_lists(self.devices)

    def _claim(self, dag: Dag, chunk: Chunk, index: int, lists: tuple[DeviceGroup, ...]) -> Chunk:
        if chunk.sharding is not None:
            first = dag.shardings[chunk.sharding].directive
            raise DirectiveError(
                f"node {chunk.label!r} is sharded twice: by directive {first} and by this one"
            )
        if chunk.devices is not None:
            return replace(chunk, sharding=index)
        if not lists:
            raise PlacementError(
                f'node {chunk.label!r} is not placed yet; devices="placed" shards over the devices that a Place before it chose'
            )
        return replace(chunk, devices=tuple(d for g in lists for d in g), sharding=index)
