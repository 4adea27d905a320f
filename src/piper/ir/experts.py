"""Expert parallelism: the bodies of an expert region, made for the part of the experts that one
device holds.

The region's parameters say how many experts there are (E: their dimension 0). Every tensor that
enters holds each expert's tokens: ``[E, C, …]``, or, in a *dropless* region (one with grouped
products), rows sorted by expert with counts ``[E]``. On one of n devices that share the experts and
work on the tokens of s devices these become ``[E/n, s·C, …]`` and ``[bound, …]`` with counts
``[E/n]``. Labels (:mod:`piper.ir.labels`) are followed through the bodies, which proves that the
region works on each expert's tokens alone, and says what becomes of every size.

Which dimension of an entering tensor is which is tried out: views at the border are part of the
region's bodies, so a tensor may enter as ``[E·C, d]`` or transposed. What passes the rules is
right, so the first that does is taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from fractions import Fraction

from msgspec.structs import replace

from piper.dtypes import DType
from piper.errors import DirectiveError, PlacementError
from piper.ids import BodyId, NodeId, ValueId
from piper.ir.body import Body, TensorSpec, body_id
from piper.ir.check import topological_order
from piper.ir.core import core_chunks
from piper.ir.dag import Chunk, Dag, DeviceGroup, ExpertLayout, LayoutKind, Role, Tags, Value
from piper.ir.label_rules import follow_body
from piper.ir.label_rules.operation import Region
from piper.ir.label_rules.products import GROUPED
from piper.ir.labels import Axis, Factor, Label, Scale, Size, Sizes
from piper.ir.symbols import Dim, Expr
from piper.ops.compute import Call


@dataclass(frozen=True, slots=True)
class Cut:
    """How a region is sharded: over how many devices, which work on the tokens of how many; the
    room for tokens on one of them in units of those that one device sends (``None``: all tokens);
    patterns of the names of parameters that each device holds whole.
    """

    count: int
    sources: int
    capacity_factor: float | None = None
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sharded:
    """What changes: chunks (their bodies), values (specs and layouts), and the new bodies."""

    chunks: Mapping[NodeId, Chunk]
    values: Mapping[ValueId, Value]
    bodies: Mapping[BodyId, Body]


def shard_regions(dag: Dag, members: Iterable[NodeId], cut: Cut) -> Sharded:
    """Cut the regions whose core chunks are *members* (whole regions: all passes).

    Raises :class:`DirectiveError` for a number of experts that does not divide, a parameter without
    experts, an operation that mixes experts or tokens or has a size that does not follow from its
    tensors, and what may not cross a region's border.
    """
    return _Sharder(dag, members, cut).run()


@dataclass(slots=True)
class _State:
    """One region of one microbatch: the number of experts, whether it is dropless, and the number
    of tokens (of an expert, or in all) once a tensor has told.
    """

    tags: Tags
    experts: int
    dropless: bool
    tokens: Dim | None = None


@dataclass(frozen=True, slots=True)
class _Guess:
    """A possible label of a tensor that enters, and the number of tokens that it means."""

    label: Label
    tokens: Dim | None


@dataclass
class _Sharder:
    dag: Dag
    members: Iterable[NodeId]
    cut: Cut
    chunks: dict[NodeId, Chunk] = field(default_factory=dict)
    values: dict[ValueId, Value] = field(default_factory=dict)
    bodies: dict[BodyId, Body] = field(default_factory=dict)
    labels: dict[ValueId, Label] = field(default_factory=dict)
    parameters: dict[str, Label] = field(default_factory=dict)

    def __post_init__(self) -> None:
        core = core_chunks(self.dag)
        chosen = set(self.members)
        self.sizes = Sizes(self.dag.batch_symbol)
        self.core = core
        self.mine = [core[n] for n in topological_order(self.dag) if n in chosen]
        self.inside = {v for chunk in self.mine for v in chunk.outputs}
        self.readers: dict[ValueId, list[Chunk]] = {}
        for chunk in core.values():
            for value in dict.fromkeys(chunk.inputs):
                self.readers.setdefault(value, []).append(chunk)
        self.chosen = chosen
        dag = self.dag
        self.results = {*dag.losses, *dag.weights, *dag.buffer_updates.values()}
        # Regions that are alike but for their values share what was found, errors too.
        self.known: dict[tuple[object, ...], tuple[Body, tuple[Label, ...]] | DirectiveError] = {}

    def run(self) -> Sharded:
        by_tags: dict[Tags, list[Chunk]] = {}
        for chunk in self.mine:
            by_tags.setdefault(chunk.tags, []).append(chunk)
        states = {tags: self._state(tags, chunks) for tags, chunks in by_tags.items()}
        for chunk in self.mine:
            try:
                self._chunk(chunk, states[chunk.tags])
            except DirectiveError as error:
                raise DirectiveError(f"expert region {chunk.label!r}: {error}") from error
        return Sharded(self.chunks, self.values, self.bodies)

    # --- parameters -------------------------------------------------------------------------------

    def _state(self, tags: Tags, chunks: Sequence[Chunk]) -> _State:
        """What the region's parameters say."""
        values = {v: self.dag.values[v] for chunk in chunks for v in chunk.inputs}
        used = {v.name: v for v in values.values() if v.role is Role.PARAMETER}
        cut = {name: v for name, v in used.items() if not self._replicated(name)}
        where = f"region {dict(tags)}"
        if not cut:
            raise DirectiveError(
                f"{where} has no parameters whose experts could be sharded; Shard the regions that hold the experts' weights"
            )
        experts = _number_of_experts(v.spec for v in cut.values())
        if wrong := [n for n, v in cut.items() if v.spec.shape[:1] != (experts,)]:
            listed = ", ".join(f"{n!r} {cut[n].spec}" for n in sorted(wrong)[:4])
            raise DirectiveError(
                f"{where} has {experts} experts, but these parameters have no such dimension 0: {listed}. If every device is to hold them "
                f"whole, name them: Shard(..., replicated={sorted(wrong)[:4]}); else leave them out of the region (code outside of all regions "
                'joins a neighbouring one: put the model around the experts into a region, for instance piper.annotate("PP", 0))'
            )
        if experts % self.cut.count:
            raise DirectiveError(
                f"{where} has {experts} experts, which {self.cut.count} devices cannot share equally; use a number of devices that "
                f"divides {experts}"
            )
        for name, value in cut.items():
            self._parameter(where, name, value)
        for name, value in used.items():
            if name not in cut:
                self.labels[value.id] = self.sizes.plain_label(value.spec)
            self.parameters[name] = self.labels[value.id]
        called = (call.target for c in chunks for call in self._body(c).calls)
        return _State(tags, experts, any(target in GROUPED for target in called))

    def _replicated(self, name: str) -> bool:
        aliases = (name, *self.dag.parameters[name].aliases)
        return any(fnmatchcase(n, pattern) for n in aliases for pattern in self.cut.replicated)

    def _parameter(self, where: str, name: str, value: Value) -> None:
        outside = [c for c in self.readers[value.id] if c.id not in self.chosen]
        if outside:
            raise DirectiveError(
                f"{where}: parameter {name!r} is also read by {outside[0].label!r}, which this Shard does not match; a parameter whose "
                "experts are sharded is used in sharded regions only"
            )
        first, *rest = self.sizes.shape(value.spec)
        dims = ((Factor(Axis.EXPERTS, first),), *(self.sizes.plain(size) for size in rest))
        label = self.labels[value.id] = Label(dims)
        if self.cut.count == 1:
            return
        spec = Scale(self.cut.count, self.cut.sources).spec(value.spec, label)
        layout = ExpertLayout(LayoutKind.PARAMETER, value.spec)
        self.values[value.id] = replace(value, spec=spec, experts=layout)

    # --- chunks -----------------------------------------------------------------------------------

    def _body(self, chunk: Chunk) -> Body:
        assert isinstance(chunk.work, Call), f"core chunk {chunk.label!r} calls no body"
        return self.dag.bodies[chunk.work.body]

    def _chunk(self, chunk: Chunk, state: _State) -> None:
        entering = [v for v in dict.fromkeys(chunk.inputs) if v not in self.labels]
        for value in list(entering):
            if (label := self._fixed(self.dag.values[value])) is not None:
                self.labels[value] = label
                entering.remove(value)
        first: DirectiveError | None = None
        for guesses in self._guesses(entering, state.tokens, state):
            tokens = next((g.tokens for g in guesses if g.tokens is not None), state.tokens)
            labels = {v: g.label for v, g in zip(entering, guesses, strict=True)}
            try:
                body, outputs = self._follow(chunk, state, tokens, labels)
                self._check_outputs(chunk, state, outputs)
            except DirectiveError as error:
                first = first or error
                continue
            state.tokens = tokens
            self._accept(chunk, state, labels, body, outputs)
            return
        raise first or self._no_experts(entering, state)

    def _fixed(self, value: Value) -> Label | None:
        """The label of what is the same on every device, whatever the microbatch."""
        if value.role in (Role.BUFFER, Role.SEED):
            return self.sizes.plain_label(value.spec)
        if value.role is Role.INPUT:
            raise DirectiveError(
                f"it reads batch input {value.name!r}, whose rows belong to one device's microbatch; route it like the tokens, outside the region"
            )
        return None

    def _no_experts(self, entering: Sequence[ValueId], state: _State) -> DirectiveError:
        specs = ", ".join(str(self.dag.values[v].spec) for v in entering)
        wanted = (
            f"rows [N, …] sorted by expert and counts [{state.experts}] (int64)"
            if state.dropless
            else f"tensors [{state.experts}, tokens per expert, …]"
        )
        return DirectiveError(
            f"what enters it ({specs}) does not show experts and tokens; expected {wanted}"
        )

    def _guesses(
        self, entering: Sequence[ValueId], tokens: Dim | None, state: _State
    ) -> Iterator[tuple[_Guess, ...]]:
        """Possible labels of all tensors that enter, the usual ones first."""
        if not entering:
            yield ()
            return
        spec = self.dag.values[entering[0]].spec
        for guess in self._labels_of(spec, tokens, state):
            for rest in self._guesses(entering[1:], guess.tokens or tokens, state):
                yield (guess, *rest)

    def _labels_of(self, spec: TensorSpec, tokens: Dim | None, state: _State) -> Iterator[_Guess]:
        shape = self.sizes.shape(spec)
        number = self.sizes.of(state.experts)
        experts = Factor(Axis.EXPERTS, number)
        rest = [self.sizes.plain(size) for size in shape]
        wanted = None if tokens is None else self.sizes.of(tokens)
        if state.dropless and spec.dtype is DType.INT64 and shape == (number,):
            yield _Guess(Label(((experts,),), counts=True), None)
            return
        for j, size in enumerate(shape):
            if wanted not in (None, size):
                continue
            dims = [*rest[:j], (Factor(Axis.TOKENS, size),), *rest[j + 1 :]]
            if state.dropless:
                yield _Guess(Label(tuple(dims)), spec.shape[j])
                continue
            for i, other in enumerate(shape):
                if i != j and other == number:
                    both = [*dims[:i], (experts,), *dims[i + 1 :]]
                    yield _Guess(Label(tuple(both)), spec.shape[j])
        if not state.dropless:
            yield from self._merged(spec, tokens, state)

    def _merged(self, spec: TensorSpec, tokens: Dim | None, state: _State) -> Iterator[_Guess]:
        """Experts and tokens in one dimension."""
        number = self.sizes.of(state.experts)
        experts = Factor(Axis.EXPERTS, number)
        rest = [self.sizes.plain(size) for size in self.sizes.shape(spec)]
        for i, size in enumerate(self.sizes.shape(spec)):
            if any(n % e for n, e in zip(size, number, strict=True)):
                continue
            each = tuple(n // e for n, e in zip(size, number, strict=True))
            if tokens is not None and each != self.sizes.of(tokens):
                continue
            known = tokens if tokens is not None else _divided(spec.shape[i], state.experts)
            for dim in (
                (experts, Factor(Axis.TOKENS, each)),
                (Factor(Axis.TOKENS, each), experts),
            ):
                yield _Guess(Label((*rest[:i], dim, *rest[i + 1 :])), known)

    def _follow(
        self, chunk: Chunk, state: _State, tokens: Dim | None, entering: Mapping[ValueId, Label]
    ) -> tuple[Body, tuple[Label, ...]]:
        inputs = tuple(entering.get(v) or self.labels[v] for v in chunk.inputs)
        body = self._body(chunk)
        key = (chunk.work, inputs, state.experts, state.dropless, tokens)
        if key not in self.known:
            try:
                self.known[key] = follow_body(body, inputs, self._region(state, tokens))
            except DirectiveError as error:
                self.known[key] = error
        found = self.known[key]
        if isinstance(found, DirectiveError):
            raise found
        return found

    def _region(self, state: _State, tokens: Dim | None) -> Region:
        number: Size = (0,) * len(self.sizes.one) if tokens is None else self.sizes.of(tokens)
        return Region(
            self.sizes,
            self._scale(state, tokens),
            self.sizes.of(state.experts),
            number,
            state.dropless,
        )

    def _scale(self, state: _State, tokens: Dim | None) -> Scale:
        if not state.dropless or tokens is None:
            return Scale(self.cut.count, self.cut.sources)
        return Scale(self.cut.count, self.cut.sources, tokens, _bound(tokens, self.cut))

    # --- what leaves, and what enters -------------------------------------------------------------

    def _check_outputs(self, chunk: Chunk, state: _State, outputs: Sequence[Label]) -> None:
        for value, label in zip(chunk.outputs, outputs, strict=True):
            info = self.dag.values[value]
            if info.role is Role.CONTRIBUTION:
                self._check_contribution(info, label)
            elif self._leaves(value):
                self._check_leaving(info, state, label)

    def _check_contribution(self, info: Value, label: Label) -> None:
        parameter = self.parameters.get(info.name)
        if parameter is None:
            raise DirectiveError(
                f"it makes a gradient of parameter {info.name!r}, which it does not read; use the parameter inside the region only"
            )
        whole = not parameter.axes
        if label.dims != parameter.dims or (Axis.EXPERTS in label.summed and not whole):
            raise DirectiveError(
                f"the gradient of parameter {info.name!r} is not cut by experts as the parameter is"
            )

    def _leaves(self, value: ValueId) -> bool:
        return value in self.results or any(
            c.id not in self.chosen for c in self.readers.get(value, ())
        )

    def _check_leaving(self, info: Value, state: _State, label: Label) -> None:
        named = [n for n, v in self.dag.buffer_updates.items() if v == info.id]
        if named:
            raise DirectiveError(
                f"its forward writes buffer {named[0]!r}; write buffers outside the sharded region (count tokens in the router)"
            )
        if label.is_plain:
            return
        if label.summed:
            raise DirectiveError(
                f"a value {info.spec} that leaves it is a sum over {', '.join(sorted(a.value for a in label.summed))}, of which each device has only a "
                "part; compute it from the tokens outside the region"
            )
        axes = [Axis.TOKENS] if state.dropless else [Axis.EXPERTS, Axis.TOKENS]
        if sorted(label.axes) != axes or (state.dropless and not _rows_first(label)):
            raise DirectiveError(
                f"a value {info.spec} that leaves it has no dimension of {' or '.join(axes)}; only the tokens' results may leave"
            )

    def _accept(
        self,
        chunk: Chunk,
        state: _State,
        entering: Mapping[ValueId, Label],
        body: Body,
        outputs: Sequence[Label],
    ) -> None:
        scale = self._scale(state, state.tokens)
        self.labels.update(entering)
        for value, label in entering.items():
            info = self.dag.values[value]
            layout = self._layout(state, info.spec, label, scale.spec(info.spec, label))
            if info.experts not in (None, layout):
                raise DirectiveError(
                    f"a value {info.spec} enters two sharded regions in different forms"
                )
            self.values[value] = replace(info, experts=layout)
        for value, label in zip(chunk.outputs, outputs, strict=True):
            info = self.dag.values[value]
            border: ExpertLayout | None = None
            if self._leaves(value) and not label.is_plain and info.role is not Role.CONTRIBUTION:
                border = self._layout(state, info.spec, label, info.spec, leaves=True)
            self.labels[value] = label
            self.values[value] = replace(info, spec=scale.spec(info.spec, label), experts=border)
        identity = body_id(body)
        self.bodies[identity] = body
        assert isinstance(chunk.work, Call)
        self.chunks[chunk.id] = replace(chunk, work=replace(chunk.work, body=identity))

    def _layout(
        self,
        state: _State,
        whole: TensorSpec,
        label: Label,
        other: TensorSpec,
        *,
        leaves: bool = False,
    ) -> ExpertLayout:
        if label.counts:
            return ExpertLayout(LayoutKind.COUNTS, other)
        if state.dropless:
            if not _rows_first(label):
                raise DirectiveError(
                    f"a tensor {whole} that enters it does not have its rows first"
                )
            return ExpertLayout(LayoutKind.ROWS, other, complete=leaves and not label.zeros)
        sizes: list[int] = []
        place: dict[Axis, int] = {}
        for dim in label.dims:
            for factor in dim:
                if factor.axis is not None:
                    place[factor.axis] = len(sizes)
                elif len(set(factor.size)) > 1:
                    raise DirectiveError(
                        f"a tensor {whole} has a second size that depends on the batch"
                    )
                sizes.append(-1 if factor.axis is Axis.TOKENS else factor.size[0])
        return ExpertLayout(
            LayoutKind.CAPACITY, other, tuple(sizes), place[Axis.EXPERTS], place[Axis.TOKENS]
        )


def expert_groups(chunk: Chunk, lists: tuple[DeviceGroup, ...]) -> tuple[DeviceGroup, ...]:
    """The groups within which *chunk* shares experts: those of *lists* that are among its devices,
    or all of these if there are no lists.

    Raises :class:`PlacementError` if the lists do not partition the devices.
    """
    devices = chunk.devices or ()
    if not lists:
        return (devices,)
    here = frozenset(devices)
    inside = tuple(g for g in lists if here.issuperset(g))
    if sorted(d for g in inside for d in g) != sorted(devices):
        raise PlacementError(
            f"node {chunk.label!r} is on devices {list(devices)}, which the lists {[list(g) for g in lists]} that share its experts do "
            "not partition; shard within the region's own devices, each in one list, or leave the region to this directive: placed by no Place, "
            "it goes to the devices of the lists, whatever those around it are"
        )
    return inside


def _rows_first(label: Label) -> bool:
    return bool(label.dims) and [f.axis for f in label.dims[0]] == [Axis.TOKENS]


def _number_of_experts(specs: Iterable[TensorSpec]) -> int:
    """The most common dimension 0; of equally common ones that of the tensor with most
    dimensions.
    """
    found: Counter[int] = Counter()
    ranks: dict[int, int] = {}
    for spec in specs:
        size = spec.shape[0] if spec.shape else 0
        if isinstance(size, int) and size:
            found[size] += 1
            ranks[size] = max(ranks.get(size, 0), len(spec.shape))
    return max(found, key=lambda size: (found[size], ranks[size]), default=0)


def _divided(size: Dim, by: int) -> Dim:
    return size // by if isinstance(size, int) else Expr(f"({size})//{by}")


def _bound(tokens: Dim, cut: Cut) -> Dim:
    """The rows that there is room for on one device."""
    count = cut.sources
    everything = tokens * count if isinstance(tokens, int) else Expr(f"{count}*({tokens})")
    if cut.capacity_factor is None:
        return everything
    factor = Fraction(cut.capacity_factor).limit_denominator(10**6)
    if factor >= count:
        return everything
    up, down = factor.numerator, factor.denominator
    if isinstance(tokens, int):
        return -(-tokens * up // down)
    return Expr(f"-((-({tokens})*{up})//{down})")
