"""Derived nodes: the communication, sums and updates that follow from where the core chunks are
placed.

* A *gather* makes whole parameters of their shards before each use (``gathers``).
* An *all-to-all* exchanges what enters and leaves a sharded expert region (``experts``).
* A *transfer* carries a value to each device group that reads it and does not make it
  (``transfers``).
* An *offload* puts what the forward saved into host memory, a *fetch* brings it back for the
  backward (``offload``).
* A *sum* adds up a parameter's gradient contributions on each device group that makes some; a
  *reduction* adds the sums of replicas and of the groups that hold a tied parameter; an *update*
  lets the optimizer use the result, once per copy or slice (``updates``). A group that reads the
  parameter but makes no contribution (a detached use) is sent the result, for its own copy's
  update. The weights of a weighted loss are summed the same way and sent to every update
  (``weights``).
* Buffers that the forward writes are stored at the end, made equal on all replicas first
  (``buffers``).

Derivation is a function of the core alone. A derived node whose inputs and devices are as before
keeps its id, so that orders that name it survive later directives.
"""

from piper.ir.dag import Dag
from piper.ir.derive.buffers import store_buffers
from piper.ir.derive.builder import Builder
from piper.ir.derive.experts import find_experts
from piper.ir.derive.gathers import gather_parameters
from piper.ir.derive.offload import offload_saved
from piper.ir.derive.sharding import find_shards
from piper.ir.derive.transfers import link
from piper.ir.derive.updates import synchronise

__all__ = ["derive"]


def derive(dag: Dag) -> Dag:
    """The DAG with its derived nodes made anew.

    Raises :class:`PlacementError` where device groups cannot be linked, :class:`DirectiveError`
    where replicas cannot be kept equal, or an order names communication that no longer exists.
    """
    builder = Builder.start(dag)
    builder.experts = find_experts(builder)
    builder.shards = find_shards(builder)
    gather_parameters(builder)
    link(builder)
    offload_saved(builder)
    synchronise(builder)
    store_buffers(builder)
    return builder.finish()
