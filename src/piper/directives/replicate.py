"""Replicate: data parallelism."""

from typing import Literal

from msgspec.structs import replace

from piper.directives.base import Directive, directive, matching_chunks
from piper.directives.place import device_group
from piper.errors import DirectiveError, PlacementError
from piper.ids import Stream
from piper.ir.dag import Chunk, Dag, Replication
from piper.ir.edit import Edit, add_replication
from piper.ir.select import FilterValue, Selector

MIB = 1024 * 1024


@directive
class Replicate(Directive, frozen=True):
    """Data-parallel replicas: each device of a node's group runs it on microbatches of its own, and the
    gradients of the parameters that it uses are summed over the group once per step, after the last contribution.

    ``devices`` is ``"placed"`` (the group that each matched node is on) or a list (which then also places nodes that
    are not placed yet). ``bucket_size`` bounds one reduction in MiB (``None``: a bucket per region). ``reduce_stream``
    carries the reductions. ``replicated_buffers`` must be chosen when the forward writes buffers on several replicas
    (BatchNorm): ``"first"`` keeps the first replica's, ``"mean"`` their mean.

    Before ``Replicate({}, devices="placed")`` with the region on ``[0, 1]``::

        B PP=0 ──dW──▶ sum ──▶ UPDATE PP=0

    After::

        B PP=0 ──dW──▶ sum ──▶ all_reduce 0,1 ──▶ UPDATE PP=0
    """

    filter: dict[str, FilterValue]
    devices: list[int] | Literal["placed"] = "placed"
    bucket_size: float | None = None
    reduce_stream: str = "reduce"
    replicated_buffers: Literal["first", "mean"] | None = None

    def apply(self, dag: Dag, number: int, selector: Selector) -> Edit:
        if self.bucket_size is not None and self.bucket_size <= 0:
            raise DirectiveError(f"bucket_size is in MiB and positive, found {self.bucket_size}")
        index = len(dag.replications)
        changed = {
            chunk.id: self._claim(dag, chunk, index)
            for chunk in matching_chunks(dag, selector, self.filter)
        }
        return add_replication(
            dag,
            Replication(
                directive=number,
                bucket_bytes=None if self.bucket_size is None else int(self.bucket_size * MIB),
                reduce_stream=Stream(self.reduce_stream),
                buffers=self.replicated_buffers,
            ),
            changed,
        )

    def _claim(self, dag: Dag, chunk: Chunk, index: int) -> Chunk:
        if chunk.replication is not None:
            first = dag.replications[chunk.replication].directive
            raise DirectiveError(
                f"node {chunk.label!r} is replicated twice: by directive {first} and by this one"
            )
        if self.devices == "placed":
            return replace(chunk, replication=index)
        group = device_group(self.devices)
        if chunk.devices not in (None, group):
            raise PlacementError(
                f"node {chunk.label!r} is placed on {list(chunk.devices or ())} but replicated on {self.devices}; "
                'use devices="placed" or the same group'
            )
        return replace(chunk, devices=group, replication=index)
