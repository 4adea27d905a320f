"""Replicate: data parallelism."""

from typing import Literal

from msgspec.structs import replace

from piper.directives.base import Directive, directive, matching_chunks
from piper.directives.place import device_lists
from piper.errors import DirectiveError, PlacementError
from piper.ids import Stream
from piper.ir.dag import Chunk, Dag, DeviceGroup, Level, Replication
from piper.ir.edit import Edit, add_replication
from piper.ir.select import FilterValue, Selector

MIB = 1024 * 1024


@directive
class Replicate(Directive, frozen=True):
    """Data-parallel replicas: each device of a node's group runs it on microbatches of its own, and
    the gradients of the parameters that it uses are summed over the group.

    ``devices`` is ``"placed"`` (the group that each matched node is on) or a list (which then also
    places nodes that are not placed yet). A list of lists, ``[[0, 1], [2, 3]]``, shards within the
    inner lists and replicates across; a node that is placed is on the devices of some of the lists,
    in their order, so that one directive claims stages on ``[0, 1, 2, 3]`` and ``[4, 5, 6, 7]``
    with ``[[0, 1], [2, 3], [4, 5], [6, 7]]``.

    A parameter that several nodes use, on one group or several, is reduced over all of these: shard
    by shard where it is sharded. Several ``Replicate`` may claim them if their options are equal
    but for the devices.

    What is sharded over the replicas; each implies the ones before:

    * nothing: all-reduce once per step, after the last contribution;
    * ``shard_optimizer`` (ZeRO-1): reduce-scatter once per step, update a slice, all-gather the new parameters;
    * ``shard_grads`` (ZeRO-2): reduce-scatter each microbatch's contributions into a sharded accumulator;
    * ``shard_params`` (ZeRO-3): whole parameters exist only from an all-gather before each use until after it.

    Each parameter is cut into equal runs of its flattened elements, one per replica.
    ``bucket_size`` bounds one message in MiB (``None``: a bucket per region). ``reduce_stream`` and
    ``gather_stream`` carry the communication. ``replicated_buffers`` must be chosen when the
    forward writes buffers on several replicas (BatchNorm): ``"first"`` keeps the first replica's,
    ``"mean"`` their mean, ``"sum"`` adds every replica's change (a counter then counts on all of
    them). A buffer whose old value nothing reads needs no choice: it keeps the last replica's, as in
    one process (also under ``"sum"``).

    Before ``Replicate({}, devices="placed")`` with the region on ``[0, 1]``::

        B PP=0 ──dW──▶ sum ──▶ UPDATE PP=0

    After::

        B PP=0 ──dW──▶ sum ──▶ all_reduce 0,1 ──▶ UPDATE PP=0

    With ``shard_params=True``, a slice w of the parameter W being state::

        w ──▶ all_gather 0,1 ──W──▶ B PP=0 ──dW──▶ reduce_scatter 0,1 ──▶ sum ──▶ UPDATE PP=0
    """

    filter: dict[str, FilterValue]
    devices: list[int | list[int]] | Literal["placed"] = "placed"
    shard_optimizer: bool = False
    shard_grads: bool = False
    shard_params: bool = False
    bucket_size: float | None = None
    gather_stream: str = "gather"
    reduce_stream: str = "reduce"
    replicated_buffers: Literal["first", "mean", "sum"] | None = None

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        if self.bucket_size is not None and self.bucket_size <= 0:
            raise DirectiveError(f"bucket_size is in MiB and positive, found {self.bucket_size}")
        index, level = len(dag.replications), self._level()
        groups, everyone = self._groups()
        if level and everyone is not None and len(groups[0]) == 1:
            raise DirectiveError(
                f"{self.devices} leaves nothing to shard over: shard_optimizer, shard_grads and shard_params need groups "
                "of at least 2 replicas"
            )
        changed = {
            chunk.id: self._claim(dag, chunk, index, groups, everyone)
            for chunk in matching_chunks(dag, selector, self.filter)
        }
        return add_replication(
            dag,
            Replication(
                directive=number,
                bucket_bytes=None if self.bucket_size is None else int(self.bucket_size * MIB),
                reduce_stream=Stream(self.reduce_stream),
                gather_stream=Stream(self.gather_stream),
                level=level,
                shard_groups=groups if len(groups) > 1 else (),
                buffers=self.replicated_buffers,
            ),
            changed,
        )

    def _level(self) -> Level:
        if self.shard_params:
            return Level.PARAMETERS
        if self.shard_grads:
            return Level.GRADIENTS
        return Level.OPTIMIZER if self.shard_optimizer else Level.NONE

    def _groups(self) -> tuple[tuple[DeviceGroup, ...], DeviceGroup | None]:
        """The lists of ``devices``, and all their members; ``None`` for the group that each node is
        on.
        """
        if self.devices == "placed":
            return (), None
        groups = device_lists(self.devices)
        if len({len(g) for g in groups}) > 1:
            raise PlacementError(
                f"the inner lists of devices must have equal lengths, found {self.devices}"
            )
        return groups, tuple(d for g in groups for d in g)

    def _claim(
        self,
        dag: Dag,
        chunk: Chunk,
        index: int,
        groups: tuple[DeviceGroup, ...],
        everyone: DeviceGroup | None,
    ) -> Chunk:
        if chunk.replication is not None:
            first = dag.replications[chunk.replication].directive
            raise DirectiveError(
                f"node {chunk.label!r} is replicated twice: by directive {first} and by this one"
            )
        if everyone is None:
            return replace(chunk, replication=index)
        if chunk.devices is not None and chunk.devices != _within(chunk.devices, groups):
            remedy = (
                'use devices="placed" or the same group'
                if len(groups) == 1
                else 'use devices="placed", or lists of which some hold just these devices, in this order'
            )
            raise PlacementError(
                f"node {chunk.label!r} is placed on {list(chunk.devices)} but replicated on {self.devices}; {remedy}"
            )
        return replace(chunk, devices=chunk.devices or everyone, replication=index)


def _within(devices: DeviceGroup, groups: tuple[DeviceGroup, ...]) -> DeviceGroup:
    """The members of those of *groups* that are among *devices*, in their order."""
    return tuple(d for group in groups if set(group) <= set(devices) for d in group)
