"""The planner: a distributed training DAG becomes one program per device.

``streams`` chooses one total order, ``gathers`` lets consecutive chunks share gathered parameters,
``cut`` walks the order and lowers each node on each of its devices, ``early`` starts receives,
gathers and fetches before they are needed, ``flights`` bounds what else is in flight, ``sums`` adds
contributions as they come, ``budget`` chooses how much of all that there may be, ``program``
inserts waits where an edge crosses streams and frees values after their last use.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace as replace_struct

from piper.boundary import public
from piper.errors import CaptureError, PlacementError, SplitError, expect
from piper.ids import DeviceId, NodeId
from piper.ir.check import check_dag, unplaced
from piper.ir.dag import Chunk, Dag, LossKind
from piper.ir.derive import derive
from piper.ir.edit import replace_nodes
from piper.ir.select import Selector
from piper.ir.symbols import evaluate
from piper.pausing import collector_paused
from piper.plan.account import OptimizerBytes
from piper.plan.costs import Costs
from piper.plan.model import Plan
from piper.plan.roles import Roles, find_roles
from piper.planner.budget import Bounds, Limits, plan_within
from piper.planner.cut import Cutter
from piper.planner.estimate import Rates, costed_seconds, node_seconds
from piper.planner.gathers import share_gathers
from piper.planner.scatters import share_scatters
from piper.planner.streams import total_order
from piper.sizes import Size, to_bytes


@public
def plan(
    dag: Dag,
    *,
    memory_budget: Size | None = None,
    optimizer_bytes: OptimizerBytes = 0,
    frame_bytes: Callable[[int], int] = int,
    receive_bytes: Size | None = None,
    gather_bytes: Size | None = None,
    fetch_bytes: Size | None = None,
    reduce_bytes: Size | None = None,
    costs: Costs | None = None,
    fold: bool = False,
) -> Plan:
    """Plan one training step of *dag*. Deterministic: equal DAGs give byte-identical plans.

    ``receive_bytes`` bounds, per device, the buffers of receives that are posted before they are
    needed (default: 16 MiB), ``gather_bytes`` the sharded parameters that are gathered before they
    are needed, ``fetch_bytes`` what is brought back from host memory before it is needed. The
    latter two are by default what the one chunk that needs the most needs: what the next chunk
    needs is under way while the one before runs, and a device holds what two chunks need, not the
    whole model. ``reduce_bytes`` bounds what reductions of gradients (and what puts updated
    parameters together) are given that are in flight at once (default: three times the largest one,
    up to 64 MiB). Sizes are bytes or texts such as ``"512MiB"``.

    ``memory_budget`` bounds every device's planned peak (see :mod:`piper.plan.memory` for what
    counts). Of these bounds, those that are not given are then lowered as far as it takes, and no
    further. The optimizer's state is part of the peak if ``optimizer_bytes`` says how large it is;
    ``frame_bytes`` says what carries a message (both as in :func:`piper.plan.account.account`).

    What the strategy leaves open is ordered by *costs*, for instance a measured
    :class:`~piper.plan.profile.Profile`; without them by rough estimates. *fold*: devices that play
    the same role are planned once (see :mod:`piper.plan.roles`).

    A DAG on which nothing was placed runs on device 0. Raises :class:`PlacementError` for a region
    that nobody placed, a group that nobody replicates, groups of unequal sizes or a device number
    left out, :class:`SplitError` for a batch that does not divide, :class:`CaptureError` for a
    microbatch size for which the captured graph does not hold, :class:`MemoryBudgetError` if some
    device needs more than the budget whatever the bounds, :class:`ConfigError` for a malformed
    size.
    """
    expect(dag, Dag, "plan", "piper.capture makes one, piper.apply places it")
    sizes = {
        "memory_budget": memory_budget,
        "receive_bytes": receive_bytes,
        "gather_bytes": gather_bytes,
        "fetch_bytes": fetch_bytes,
        "reduce_bytes": reduce_bytes,
    }
    budget, *bounds = (
        None if size is None else to_bytes(size, name) for name, size in sizes.items()
    )
    limits = Limits(budget, Bounds(*bounds), optimizer_bytes, frame_bytes)
    return plan_with(dag, limits, costs, fold=fold)


def plan_with(
    dag: Dag,
    limits: Limits,
    costs: Costs | None = None,
    *,
    fold: bool = False,
    num_devices: int | None = None,
) -> Plan:
    """:func:`plan`, with what is said about memory in one piece. *num_devices*: how many devices
    there are; those on which nothing is placed have nothing to do. ``None``: there are none such.
    """
    with collector_paused():
        return _plan(dag, limits, costs, fold=fold, given=num_devices)


def _plan(dag: Dag, limits: Limits, costs: Costs | None, *, fold: bool, given: int | None) -> Plan:
    dag = _placed(dag)
    _check_claimed(dag)
    _check_sizes(dag)
    num_devices = _count_devices(dag) if given is None else given
    size = microbatch_size(dag)
    bindings = {} if dag.batch_symbol is None else {dag.batch_symbol: size}
    _check_guards(dag, size)
    seconds = _seconds(dag, bindings, costs)
    order = total_order(dag, seconds)
    dag = share_gathers(dag, order)
    dag, order = share_scatters(dag, [node for node in order if node in dag.nodes])
    roles = find_roles(dag, num_devices) if fold else Roles(())
    represented = frozenset(role[0] for role in roles.roles) if roles.folded else None

    def cut(bounds: Bounds) -> tuple[Plan, Bounds]:
        cutter = Cutter(dag, order, bindings, num_devices, seconds, bounds, represented)
        return _assembled(dag, bindings, size, cutter, roles), cutter.bounds

    return plan_within(limits, cut)


def _assembled(
    dag: Dag, bindings: Mapping[str, int], size: int, cutter: Cutter, roles: Roles
) -> Plan:
    devices, communicators = cutter.cut()
    weighted = dag.loss_kind is LossKind.WEIGHTED
    replicas, microbatches = dag.num_replicas, dag.num_microbatches
    return Plan(
        num_devices=len(devices),
        dag=dag,
        bindings=bindings,
        microbatch_size=size,
        num_microbatches=microbatches,
        num_replicas=replicas,
        seed_value=1.0 if weighted else 1.0 / (replicas * microbatches),
        communicators=communicators,
        devices=devices,
        roles=roles.roles if roles.folded else (),
    )


def _seconds(dag: Dag, bindings: Mapping[str, int], costs: Costs | None) -> Mapping[NodeId, float]:
    if costs is None:
        return node_seconds(dag, bindings, Rates())
    return costed_seconds(dag, bindings, costs)


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
    regions = sorted({str(dict(dag.region(c.tags))) for c in missing})
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
    """Chunks that exchange nothing are not linked, but they too run every microbatch of the batch
    exactly once. Sharded expert regions run what is sent to them.
    """
    first: dict[int, Chunk] = {}
    for chunk in dag.chunks():
        if not chunk.derived and chunk.sharding is None:
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
