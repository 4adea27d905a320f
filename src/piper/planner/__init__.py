"""The planner: a distributed training DAG becomes one program per device.

``streams`` chooses one total order, ``gathers`` lets consecutive chunks share gathered parameters, ``cut`` walks the order and lowers
each node on each of its devices, ``early`` starts receives and gathers before they are needed, ``sums`` adds contributions as they
come, ``program`` inserts waits where an edge crosses streams and frees values after their last use.
"""

from msgspec.structs import replace as replace_struct

from piper.errors import CaptureError, PlacementError, SplitError
from piper.ids import DeviceId
from piper.ir.check import check_dag, unplaced
from piper.ir.dag import Chunk, Dag, LossKind
from piper.ir.derive import derive
from piper.ir.edit import replace_nodes
from piper.ir.select import Selector
from piper.ir.symbols import evaluate
from piper.pausing import collector_paused
from piper.plan.model import Plan
from piper.planner.cut import Cutter
from piper.planner.estimate import Rates, node_seconds
from piper.planner.gathers import share_gathers
from piper.planner.streams import total_order

RECEIVE_BYTES = 16 * 1024 * 1024
GATHER_BYTES = 64 * 1024 * 1024


def plan(dag: Dag, *, receive_bytes: int = RECEIVE_BYTES, gather_bytes: int = GATHER_BYTES) -> Plan:
    """Plan one training step of *dag*. Deterministic: equal DAGs give byte-identical plans.

    ``receive_bytes`` bounds, per device, the buffers of receives that are posted before they are needed, ``gather_bytes`` the
    sharded parameters that are gathered before they are needed.

    A DAG on which nothing was placed runs on device 0. Raises :class:`PlacementError` for a region that nobody placed, a
    group that nobody replicates, groups of unequal sizes or a device number left out, :class:`SplitError` for a batch that does not divide, :class:`CaptureError` for a microbatch size
    for which the captured graph does not hold.
    """
    with collector_paused():
        return _plan(dag, receive_bytes, gather_bytes)


def _plan(dag: Dag, receive_bytes: int, gather_bytes: int) -> Plan:
    dag = _placed(dag)
    _check_claimed(dag)
    _check_sizes(dag)
    num_devices = _count_devices(dag)
    size = microbatch_size(dag)
    bindings = {} if dag.batch_symbol is None else {dag.batch_symbol: size}
    _check_guards(dag, size)
    order = total_order(dag, node_seconds(dag, bindings, Rates()))
    dag = share_gathers(dag, order)
    cutter = Cutter(
        dag,
        [node for node in order if node in dag.nodes],
        bindings,
        num_devices,
        receive_bytes=receive_bytes,
        gather_bytes=gather_bytes,
    )
    devices, communicators = cutter.cut()
    weighted = dag.loss_kind is LossKind.WEIGHTED
    replicas, microbatches = dag.num_replicas, dag.num_microbatches
    return Plan(
        num_devices=num_devices,
        dag=dag,
        bindings=bindings,
        microbatch_size=size,
        num_microbatches=microbatches,
        num_replicas=replicas,
        seed_value=1.0 if weighted else 1.0 / (replicas * microbatches),
        communicators=communicators,
        devices=devices,
    )


def violated_guard(dag: Dag, size: int) -> str | None:
    """The condition of the captured graph that microbatches of *size* rows violate, if any."""
    if dag.batch_symbol is None:
        return None if size == dag.captured_size else f"rows == {dag.captured_size}"
    bindings = {dag.batch_symbol: size}
    return next((guard for guard in dag.guards if not evaluate(guard, bindings)), None)


def microbatch_size(dag: Dag) -> int:
    """Rows of one microbatch. Raises :class:`SplitError` if the batch does not divide."""
    replicas, microbatches = dag.num_replicas, dag.num_microbatches
    size, rest = divmod(dag.batch_size, replicas * microbatches)
    if rest:
        raise SplitError(
            f"the batch of {dag.batch_size} rows does not divide into {replicas} replicas × {microbatches} microbatches; "
            f"choose a batch size that is a multiple of {replicas * microbatches}"
        )
    return size


def _check_guards(dag: Dag, size: int) -> None:
    if (guard := violated_guard(dag, size)) is not None:
        raise CaptureError(
            f"the model's graph was captured under the condition {guard!r}, which does not hold for microbatches "
            f"of {size} rows; capture it again with batch_size={size}"
        )


def _placed(dag: Dag) -> Dag:
    missing = unplaced(dag)
    if not missing:
        return dag
    core = [c for c in dag.chunks() if not c.derived]
    if len(missing) == len(core):
        changed = {c.id: replace_struct(c, devices=(DeviceId(0),)) for c in core}
        dag = derive(replace_nodes(dag, changed).dag)
        check_dag(dag)
        return dag
    splits = {s.name for s in dag.splits}
    regions = sorted({str(dict(t for t in c.tags if t[0] not in splits)) for c in missing})
    raise PlacementError(
        f"{len(missing)} of {len(core)} chunks are not placed on any device: regions {', '.join(regions[:8])}; "
        f"add a Place for them (tags: {Selector(dag).describe_tags()})"
    )


def _check_claimed(dag: Dag) -> None:
    for chunk in dag.chunks():
        claimed = chunk.replication is not None or chunk.sharding is not None
        if not chunk.derived and len(chunk.participants) > 1 and not claimed:
            raise PlacementError(
                f"node {chunk.label!r} is placed on {len(chunk.participants)} devices {list(chunk.participants)}, but nothing "
                'says how they share it; add Replicate(..., devices="placed"), or Shard for experts'
            )


def _check_sizes(dag: Dag) -> None:
    """Chunks that exchange nothing are not linked, but they too run every microbatch of the batch exactly once."""
    first: dict[int, Chunk] = {}
    for chunk in dag.chunks():
        if not chunk.derived:
            first.setdefault(len(chunk.participants), chunk)
    if len(first) > 1:
        one, two = list(first.values())[:2]
        raise PlacementError(
            f"device groups must have equal sizes (member r runs replica r's microbatches), but {one.label!r} is on devices "
            f"{list(one.participants)} and {two.label!r} on {list(two.participants)}"
        )


def _count_devices(dag: Dag) -> int:
    used = {d for node in dag.nodes.values() for d in node.participants}
    count = 1 + max(used)
    if idle := sorted(set(map(DeviceId, range(count))) - used):
        raise PlacementError(
            f"the strategy uses device {count - 1}, but nothing runs on {', '.join(map(str, idle[:8]))}; number devices from 0 "
            "without gaps, each is one worker"
        )
    return count
