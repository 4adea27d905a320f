"""Whether the parts of a training DAG fit together: every number in it points at something that
exists, every count is one that there can be.

:mod:`piper.ir.check` holds the invariants that directives must keep; this is what everything takes
for granted, also of a DAG that was read from a file. Work is linear in the size of the DAG.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from piper.errors import CaptureError, OrderError
from piper.ids import DeviceId, NodeId, ValueId
from piper.ir.body import TensorSpec
from piper.ir.check import topological_order
from piper.ir.check_body import body_problems, spec_problems
from piper.ir.dag import SOURCES, Chunk, Comm, Dag, ExpertLayout, LossKind, Node, Role, Value
from piper.ir.symbols import Expr, symbols_of
from piper.limits import MAX_DEVICES, MAX_MICROBATCHES, MAX_NUMBER
from piper.ops.base import NodeShape, Work
from piper.ops.compute import Call

_NO_FLAWS = Work.flaws


def dag_problems(
    dag: Dag, allowed: Collection[str] = (), *, num_devices: int = MAX_DEVICES
) -> Iterator[str]:
    """What does not fit, each with its place. *allowed* are patterns of operators of other
    libraries that bodies may call; devices are numbered below *num_devices*.
    """
    found = False
    for text in _parts(dag, allowed, num_devices):
        found = True
        yield text
    if not found:  # else there may be edges to nothing
        try:
            topological_order(dag)
        except OrderError as error:
            yield str(error)


def _parts(dag: Dag, allowed: Collection[str], num_devices: int) -> Iterator[str]:
    splits = list(_splits(dag))
    yield from splits
    if splits:
        return
    yield from _batch(dag)
    symbols = () if dag.batch_symbol is None else (dag.batch_symbol,)
    for name, body in dag.bodies.items():
        for text in body_problems(body, symbols, allowed):
            yield f"body {name[:24]}: {text}"
    yield from _state(dag, symbols, num_devices)
    yield from _Values(dag, symbols).problems()
    yield from _Nodes(dag, num_devices).problems()
    yield from _references(dag)


def _splits(dag: Dag) -> Iterator[str]:
    names: set[str] = set()
    pieces = 1
    for split in dag.splits:
        if split.count < 1:
            yield f"split {split.name!r:.40}: expected a count of 1 or more, found {split.count}"
        if split.name in names:
            yield f"split {split.name!r:.40} is there twice"
        names.add(split.name)
        pieces *= min(max(split.count, 1), MAX_MICROBATCHES + 1)
        if pieces > MAX_MICROBATCHES:
            yield f"splits: expected at most {MAX_MICROBATCHES} microbatches in all"
            return


def _batch(dag: Dag) -> Iterator[str]:
    symbol = dag.batch_symbol
    if symbol is not None and not (symbol.isascii() and symbol.isidentifier()):
        yield f"batch_symbol: {symbol!r:.40} is not a name"
    for name in ("batch_size", "captured_size"):
        if not 0 <= getattr(dag, name) <= MAX_NUMBER:
            yield f"{name}: expected a number of rows, found {getattr(dag, name)!r:.40}"
    known = frozenset(() if symbol is None else (symbol,))
    for i, guard in enumerate(dag.guards):
        try:
            unknown = symbols_of(guard) - known
        except CaptureError as error:
            yield f"guards[{i}]: {error}"
            continue
        if unknown:
            yield f"guards[{i}]: {guard!r:.80} uses symbol {min(unknown)!r:.40}, which there is not"
    names: set[str] = set()
    numbers: set[int] = set()
    for leaf in dag.batch:
        where = f"batch leaf {leaf.name!r:.60}"
        yield from (f"{where}: {text}" for text in spec_problems(leaf.spec, known))
        if leaf.name in names or leaf.index in numbers:
            yield f"{where}: its name or its index {leaf.index} is another's too"
        if not 0 <= leaf.index <= MAX_NUMBER:
            yield f"{where}: expected an index of 0 or more, found {leaf.index}"
        if leaf.batch_dim is not None and not 0 <= leaf.batch_dim < len(leaf.spec.shape):
            yield f"{where}: dimension {leaf.batch_dim} does not exist; there are {len(leaf.spec.shape)}"
        names.add(leaf.name)
        numbers.add(leaf.index)


def _state(dag: Dag, symbols: Collection[str], num_devices: int) -> Iterator[str]:
    """Parameters, buffers, and on which devices their parts are."""
    for kind, members in (("parameter", dag.parameters), ("buffer", dag.buffers)):
        for name, member in members.items():
            where = f"{kind} {name!r:.80}"
            if member.name != name:
                yield f"{where}: it is listed under another name than its own, {member.name!r:.80}"
            yield from (f"{where}: {text}" for text in spec_problems(member.spec, symbols))
    for field, groups_of in (("shards", dag.shards), ("expert_groups", dag.expert_groups)):
        for name, groups in groups_of.items():
            where = f"{field} of {name!r:.80}"
            if name not in dag.parameters:
                yield f"{where}: there is no such parameter"
            yield from (f"{where}: {text}" for text in _groups(groups, num_devices))
    for i, replication in enumerate(dag.replications):
        if replication.bucket_bytes is not None and not 0 <= replication.bucket_bytes <= MAX_NUMBER:
            yield f"replications[{i}]: expected a number of bytes as bucket_bytes, found {replication.bucket_bytes!r:.40}"
    if dag.clip is not None and dag.clip.max_norm is not None and not dag.clip.max_norm > 0:
        yield f"clip: expected a positive max_norm, found {dag.clip.max_norm}"


def _groups(groups: Sequence[tuple[DeviceId, ...]], num_devices: int) -> Iterator[str]:
    devices = [device for group in groups for device in group]
    if not all(groups):
        yield "a group of devices is empty"
    if len(set(devices)) != len(devices):
        yield "a device is there twice"
    if devices and not 0 <= min(devices) <= max(devices) < num_devices:
        wrong = min(devices) if min(devices) < 0 else max(devices)
        yield f"device {wrong!r:.40} does not exist; there are {num_devices}"


class _Values:
    """The check of values; specs that values share are looked at once."""

    def __init__(self, dag: Dag, symbols: Collection[str]) -> None:
        self._dag = dag
        self._symbols = symbols
        self._names: dict[Role, Collection[str]] = {
            **dict.fromkeys(
                (Role.PARAMETER, Role.SHARD, Role.KEPT, Role.GATHERED, Role.CONTRIBUTION),
                dag.parameters,
            ),
            Role.BUFFER: dag.buffers,
            Role.INPUT: frozenset(leaf.name for leaf in dag.batch),
        }
        self._fine: dict[TensorSpec, bool] = {}

    def problems(self) -> Iterator[str]:
        """In the order of the values."""
        names, count, fine = self._names, self._dag.num_microbatches, self._fine
        for number, value in self._dag.values.items():
            known = names.get(value.role)
            if (
                number == value.id
                and value.spec in fine
                and (known is None or value.name in known)
                and 0 <= value.microbatch < count
                and value.experts is None
            ):
                continue
            for text in self._of(number, value, known, count):
                yield f"value {number} ({value.role}): {text}"

    def _of(
        self, number: ValueId, value: Value, known: Collection[str] | None, count: int
    ) -> Iterator[str]:
        if number != value.id:
            yield f"it is listed under another number than its own, {value.id}"
        texts = list(spec_problems(value.spec, self._symbols))
        yield from texts
        if not texts:
            self._fine[value.spec] = True
        if known is not None and value.name not in known:
            yield f"there is no {value.role} {value.name!r:.80}"
        if not 0 <= value.microbatch < count:
            yield f"microbatch {value.microbatch!r:.40} does not exist; there are {count}"
        if value.experts is not None:
            yield from self._layout(value, value.experts)

    def _layout(self, value: Value, layout: ExpertLayout) -> Iterator[str]:
        yield from spec_problems(layout.other, self._symbols)
        dims = max(len(layout.sizes), len(value.spec.shape), len(layout.other.shape))
        if any(not -1 <= size <= MAX_NUMBER for size in layout.sizes):
            yield f"sizes of experts {layout.sizes!r:.80}: expected 0 or more, or -1"
        for name in ("expert_dim", "token_dim"):
            dim = getattr(layout, name)
            if not 0 <= dim < max(dims, 1):
                yield f"{name} {dim!r:.40} does not exist; there are {dims} dimensions"


class _Nodes:
    """The check of nodes."""

    def __init__(self, dag: Dag, num_devices: int) -> None:
        self._dag = dag
        self._num_devices = num_devices
        self._known_groups: set[tuple[tuple[DeviceId, ...], ...]] = set()
        self._splits: Mapping[str, int] = {split.name: split.count for split in dag.splits}
        self._states = {
            (value.role.value, value.name) for value in dag.values.values() if value.role in SOURCES
        }

    def problems(self) -> Iterator[str]:
        """In the order of the nodes."""
        values = self._dag.values
        made: dict[ValueId, NodeId] = {}
        for number, node in self._dag.nodes.items():
            texts = [] if number == node.id else [f"it is listed under another number, {number}"]
            texts += [
                f"it reads value {value!r:.40}, which there is not"
                for value in node.inputs
                if value not in values
            ]
            for value in node.outputs:
                if value not in values:
                    texts.append(f"it makes value {value!r:.40}, which there is not")
                elif (first := made.setdefault(value, number)) != number:
                    texts.append(f"it makes value {value}, which node {first} makes")
            texts += self._tags(node)
            texts += self._place(node)
            texts += self._work(node)
            for text in texts:
                yield f"node {number} [{node.label[:80]}]: {text}"

    def _tags(self, node: Node) -> list[str]:
        splits, texts = self._splits, list[str]()
        for name, number in node.tags:
            if name in splits and not 0 <= number < splits[name]:
                texts.append(f"{name}={number!r:.40} does not exist; the split has {splits[name]}")
        return texts

    def _place(self, node: Node) -> list[str]:
        texts = [] if node.stream else ["its stream has no name"]
        if isinstance(node, Comm):
            groups = node.groups
            if not groups:
                texts.append("it has no groups")
        else:
            groups = () if node.devices is None else (node.devices,)
            for name, many in (
                ("replication", len(self._dag.replications)),
                ("sharding", len(self._dag.shardings)),
            ):
                index = getattr(node, name)
                if index is not None and not 0 <= index < many:
                    texts.append(f"{name} {index!r:.40} does not exist; there are {many}")
        if groups not in self._known_groups:
            wrong = list(_groups(groups, self._num_devices))
            texts += wrong
            if not wrong:
                self._known_groups.add(groups)
        return texts

    def _work(self, node: Node) -> list[str]:
        work = node.work
        if isinstance(work, Call):
            return self._call(node, work)
        texts: list[str] = []
        if type(work).flaws is not _NO_FLAWS:
            groups = node.groups if isinstance(node, Comm) else ()
            texts += work.flaws(NodeShape(len(node.inputs), len(node.outputs), groups))
        if work.communicates != isinstance(node, Comm):
            texts.append(f"{work.kind} is no work of such a node")
        for role, name in work.overwrites():
            if role != Role.BUFFER.value and name not in self._dag.parameters:
                texts.append(f"there is no parameter {name!r:.80}")
            if (role, name) not in self._states:
                texts.append(f"it overwrites {role} {name!r:.80}, which there is not")
        return texts

    def _call(self, node: Node, work: Call) -> list[str]:
        if not isinstance(node, Chunk):
            return ["a communication calls a body"]
        body = self._dag.bodies.get(work.body)
        if body is None:
            return [f"body {work.body!r:.40} is not in the plan"]
        texts = []
        for name, found, expected in (
            ("inputs", len(node.inputs), len(body.inputs)),
            ("outputs", len(node.outputs), len(body.outputs)),
            ("random streams", len(work.rng), body.num_rngs),
        ):
            if found != expected:
                texts.append(f"it has {found} {name}, its body {expected}")
        if any(not 0 <= ordinal <= MAX_NUMBER for ordinal in work.rng):
            texts.append(f"random streams {work.rng!r:.80}: expected numbers of 0 or more")
        return texts


def _references(dag: Dag) -> Iterator[str]:
    """What the DAG lists besides its nodes."""
    nodes, values = dag.nodes, dag.values
    for i, edge in enumerate(dag.order):
        if edge.before not in nodes or edge.after not in nodes:
            yield f"order[{i}]: node {edge.before!r:.40} or {edge.after!r:.40} does not exist"
    for i, overlap in enumerate(dag.overlaps):
        if missing := [node for node in overlap.nodes if node not in nodes]:
            yield f"overlaps[{i}]: node {missing[0]!r:.40} does not exist"
    for name, contributions in dag.contributions.items():
        if name not in dag.parameters:
            yield f"contributions: there is no parameter {name!r:.80}"
        if unmade := [value for value in contributions if value not in dag.producers]:
            yield f"contributions of {name!r:.80}: no node makes value {unmade[0]!r:.40}"
    for name, value in dag.buffer_updates.items():
        if name not in dag.buffers or value not in values:
            yield f"buffer_updates: there is no buffer {name!r:.80}, or no value {value!r:.40}"
    count = dag.num_microbatches
    yield from _per_microbatch(dag, "losses", dag.losses, count)
    weighted = dag.loss_kind is LossKind.WEIGHTED
    yield from _per_microbatch(dag, "weights", dag.weights, count if weighted else 0)


def _per_microbatch(dag: Dag, field: str, found: Sequence[ValueId], expected: int) -> Iterator[str]:
    if len(found) != expected:
        yield f"{field}: expected {expected}, one per microbatch, found {len(found)}"
    for value in found:
        producer = dag.nodes.get(dag.producers.get(value, NodeId(-1)))
        if not isinstance(producer, Chunk):
            yield f"{field}: no chunk makes value {value!r:.40}"


def binding_problems(dag: Dag, bindings: Mapping[str, int]) -> Iterator[str]:
    """Which sizes of *dag* are none under *bindings*; for a DAG that has no problems of its own."""
    seen: set[TensorSpec] = set()
    specs = [("value", v.spec) for v in dag.values.values()]
    specs += [("parameter", parameter.spec) for parameter in dag.parameters.values()]
    specs += [("buffer", buffer.spec) for buffer in dag.buffers.values()]
    for what, spec in specs:
        if spec in seen or not any(isinstance(size, Expr) for size in spec.shape):
            continue
        seen.add(spec)
        try:
            sizes = spec.sizes(bindings)
        except CaptureError as error:
            yield f"{what} of shape {spec}: {error}"
            continue
        if min(sizes) < 0 or math.prod(sizes) * spec.dtype.itemsize > MAX_NUMBER:
            yield f"{what} of shape {spec}: its sizes are {sizes}"
