"""Recomputation: a backward computes anew what its forward would have kept for it.

For a backward chunk B and a forward chunk F of the same region and microbatch, the part of F's body
that computes what B reads of F moves in front of B's body. B then reads what that part reads: what
F itself read (activations of other regions, parameters, batch inputs, the buffers' values from
before F wrote them), and such values of F as are to be kept. F no longer makes what nobody reads
any more. Bodies are pure, so nothing happens twice; random calls draw from the streams that they
drew from in F, so they draw the same numbers.

Regions that are alike but for their values (the microbatches of one region) share one rewrite: it
works on values numbered by their first occurrence in the region.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_struct

from piper.ids import BodyId, NodeId, ValueId
from piper.ir import body as ir
from piper.ir.body import GETITEM, Body, TensorSpec, body_id, call_refs
from piper.ir.core import core_chunks
from piper.ir.dag import Chunk, Dag, Node, Pass, Role, Tags, Value
from piper.ir.edit import Edit
from piper.ir.parts import Local, Part, Reference, assemble, slice_calls, spec_of, whole
from piper.ops.compute import Call


def recompute(dag: Dag, regions: Collection[Tags], number: int, save: Collection[str]) -> Edit:
    """Let the backward chunks with the tags *regions* recompute what the forward chunks with the
    same tags made for them, save for results of the operators named *save*. *number* is the
    directive that asks for it.
    """
    return _Recomputation(dag, regions, number, frozenset(save)).edit()


def operator_name(call: ir.Call) -> str:
    """The operator without namespace and overload: ``mm`` for ``aten.mm.default``."""
    return call.target.split(".")[1]


def forward_operators(dag: Dag, regions: Collection[Tags]) -> frozenset[str]:
    """Names of the operators that the forward chunks with the tags *regions* call, where they have
    a backward.
    """
    members = [c for c in core_chunks(dag).values() if c.tags in regions]
    backward = {c.tags for c in members if c.pass_ is not Pass.FORWARD}
    found = {_body(c) for c in members if c.pass_ is Pass.FORWARD and c.tags in backward}
    calls = (call for body in found for call in dag.bodies[body].calls)
    return frozenset(operator_name(call) for call in calls if call.target != GETITEM)


def _body(chunk: Chunk) -> BodyId:
    assert isinstance(chunk.work, Call), f"core chunk {chunk.label!r} calls no body"
    return chunk.work.body


@dataclass(frozen=True, slots=True)
class _Code:
    """A chunk of a region: its body, what it reads and makes, and the ordinals of its random
    calls.
    """

    body: BodyId
    inputs: tuple[Local, ...]
    outputs: tuple[Local, ...]
    rng: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Region:
    """The forward and backward chunks of one region and microbatch, in the order in which they run.

    ``wanted``: the values that others read. ``losses``, ``seeds``: which are losses, and the
    gradients of the step's loss.
    """

    forward: tuple[_Code, ...]
    backward: tuple[_Code, ...]
    wanted: frozenset[Local]
    losses: frozenset[Local]
    seeds: frozenset[Local]
    num_values: int


class _Recomputation:
    """The rewrite of a DAG."""

    def __init__(
        self, dag: Dag, regions: Collection[Tags], number: int, save: frozenset[str]
    ) -> None:
        self._dag, self._number, self._save = dag, number, save
        self._core = core_chunks(dag)
        self._losses = frozenset(dag.losses)
        self._wanted = self._read_elsewhere()
        self._bodies = dict(dag.bodies)
        self._values = dict(dag.values)
        self._next = max(dag.values, default=-1) + 1
        self._known: dict[_Region, _Rewriter] = {}
        self._members: dict[Tags, list[Chunk]] = {}
        for chunk in self._core.values():
            if chunk.tags in regions:
                self._members.setdefault(chunk.tags, []).append(chunk)

    def edit(self) -> Edit:
        nodes: dict[NodeId, Node] = dict(self._dag.nodes)
        for members in self._members.values():
            for chunk in self._rewritten(members):
                nodes[chunk.id] = chunk
        used = {n.work.body for n in nodes.values() if isinstance(n.work, Call)}
        bodies = {b: body for b, body in self._bodies.items() if b in used}
        return Edit(replace(self._dag, nodes=nodes, values=self._values, bodies=bodies), {})

    def _read_elsewhere(self) -> set[ValueId]:
        """The values that chunks of other regions or microbatches read, and the results of the
        step.
        """
        dag = self._dag
        home = {v: chunk.tags for chunk in self._core.values() for v in chunk.outputs}
        read = {v for c in self._core.values() for v in c.inputs if home.get(v) != c.tags}
        read.update(dag.losses, dag.weights, dag.buffer_updates.values())
        read.update(*dag.contributions.values())
        return read

    def _rewritten(self, members: Sequence[Chunk]) -> Iterator[Chunk]:
        forward = [c for c in members if c.pass_ is Pass.FORWARD]
        backward = [c for c in members if c.pass_ is not Pass.FORWARD]
        chunks = [*forward, *backward]
        values = list(dict.fromkeys(v for c in chunks for v in (*c.inputs, *c.outputs)))
        region = self._region(forward, backward, values)
        if region not in self._known:
            self._known[region] = _Rewriter(region, self._bodies, self._save)
        rewriter = self._known[region]
        values += [self._new_value(spec) for spec in rewriter.fresh]
        for chunk, code in zip(chunks, (*rewriter.forward, *rewriter.backward), strict=True):
            new = replace_struct(
                chunk,
                inputs=tuple(values[i] for i in code.inputs),
                outputs=tuple(values[i] for i in code.outputs),
                work=Call(code.body, code.rng),
                recompute=self._number,
            )
            for value in set(chunk.outputs).difference(new.outputs):
                del self._values[value]
            yield new

    def _region(
        self, forward: Sequence[Chunk], backward: Sequence[Chunk], values: Sequence[ValueId]
    ) -> _Region:
        local = {value: i for i, value in enumerate(values)}

        def codes(chunks: Iterable[Chunk]) -> Iterator[_Code]:
            for chunk in chunks:
                inputs = tuple(local[v] for v in chunk.inputs)
                outputs = tuple(local[v] for v in chunk.outputs)
                assert isinstance(chunk.work, Call)
                yield _Code(_body(chunk), inputs, outputs, chunk.work.rng)

        return _Region(
            tuple(codes(forward)),
            tuple(codes(backward)),
            frozenset(local[v] for v in values if v in self._wanted),
            frozenset(local[v] for v in values if v in self._losses),
            frozenset(local[v] for v in values if self._values[v].role is Role.SEED),
            len(values),
        )

    def _new_value(self, spec: TensorSpec) -> ValueId:
        value = ValueId(self._next)
        self._next += 1
        self._values[value] = Value(value, spec, Role.ACTIVATION)
        return value


class _Rewriter:
    """The rewrite of one region: ``forward`` and ``backward`` as they are to be; new bodies are
    added to *bodies*.

    Values that are kept though nobody read them before have numbers from ``region.num_values`` on;
    ``fresh`` are their specs.
    """

    def __init__(self, region: _Region, bodies: dict[BodyId, Body], save: frozenset[str]) -> None:
        self._region, self._bodies = region, bodies
        self._saved = {f.body: _results_of(bodies[f.body], save) for f in region.forward}
        self._kept: dict[tuple[_Code, Reference], Local] = {}
        self.fresh: list[TensorSpec] = []
        self.backward = tuple(self._backward(code) for code in region.backward)
        self.forward = self._forward()

    def _backward(self, code: _Code) -> _Code:
        """*code* with the recomputation in front."""
        parts: list[Part] = []
        read: set[Local] = set()
        recomputed = set(code.inputs) - self._region.losses  # a loss is a number, kept anyway
        # From the last forward chunk to the first: what the recomputation of one reads of another
        # is kept.
        for forward in reversed(self._region.forward):
            body, saved = self._bodies[forward.body], self._saved[forward.body]
            makes = {
                value: ref
                for value, ref in zip(forward.outputs, body.outputs, strict=True)
                if value in recomputed and value not in read and ref not in saved
            }
            if not makes:
                continue
            calls, refs = slice_calls(body, makes.values(), saved)
            reads = {ref: self._value(forward, ref) for ref in refs}
            read.update(reads.values())
            parts.append(Part(body, forward.rng, calls, reads, makes))
        if not parts:
            return code
        own = whole(self._bodies[code.body], code.inputs, code.outputs, code.rng)
        return self._assembled([*self._after_loss(code, parts), *parts[::-1], own], code.outputs)

    def _after_loss(self, code: _Code, parts: Sequence[Part]) -> Iterator[Part]:
        """A part that only reads the loss, if *code* begins the backward and reads nothing else
        that the forward made.

        Else nothing would keep the backward, and its recomputation, from running before the
        forward.
        """
        if self._region.seeds.isdisjoint(code.inputs):
            return
        made = {value for part in parts for value in part.makes}
        read = {v for part in parts for v in part.reads.values()} | set(code.inputs) - made
        for forward in self._region.forward:
            for loss in self._region.losses.intersection(forward.outputs):
                if read.isdisjoint(forward.outputs):
                    body = self._bodies[forward.body]
                    ref = body.outputs[forward.outputs.index(loss)]
                    yield Part(body, forward.rng, (), {ref: loss}, {})

    def _forward(self) -> tuple[_Code, ...]:
        """The forward chunks, making what is still read."""
        needed = set(self._region.wanted)
        needed.update(v for code in self.backward for v in code.inputs)
        codes: list[_Code] = []
        for code in reversed(self._region.forward):
            body = self._bodies[code.body]
            made = dict(zip(code.outputs, body.outputs, strict=True))
            made.update({v: ref for (maker, ref), v in self._kept.items() if maker == code})
            makes = {value: ref for value, ref in made.items() if value in needed}
            new = code
            if tuple(makes) != code.outputs:
                calls, refs = slice_calls(body, makes.values(), ())
                reads = {ref: code.inputs[ref] for ref in refs}
                part = Part(body, code.rng, calls, reads, makes)
                new = self._assembled([part], tuple(makes))
            needed.update(new.inputs)
            codes.append(new)
        return tuple(codes[::-1])

    def _value(self, code: _Code, ref: Reference) -> Local:
        """The value that the reference *ref* of the forward chunk *code* is, or from now on will
        be.
        """
        body = self._bodies[code.body]
        if ref < len(body.inputs):
            return code.inputs[ref]
        if ref in body.outputs:
            return code.outputs[body.outputs.index(ref)]
        if (code, ref) not in self._kept:
            self._kept[code, ref] = self._region.num_values + len(self.fresh)
            self.fresh.append(spec_of(body, ref))
        return self._kept[code, ref]

    def _assembled(self, parts: Sequence[Part], outputs: tuple[Local, ...]) -> _Code:
        body, inputs, rng = assemble(parts, outputs)
        identity = body_id(body)
        self._bodies[identity] = body
        return _Code(identity, inputs, outputs, rng)


def _results_of(body: Body, operators: frozenset[str]) -> frozenset[Reference]:
    """References to the tensors that the named operators make."""
    count = len(body.inputs)
    found: set[Reference] = set()
    several: set[Reference] = set()
    for ref, call in enumerate(body.calls, start=count):
        maker = call
        if call.target == GETITEM:
            (source,) = call_refs(call)
            if source < count:
                continue
            several.add(source)
            maker = body.calls[source - count]
        if operator_name(maker) in operators and call.results[0] is not None:
            found.add(ref)
    return frozenset(found - several)
