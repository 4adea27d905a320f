"""The code of a backward, cut into two: what its *results* depend on (gradients that other chunks
read), and the rest, which makes *contributions* (gradients of parameters).

What both need is made by the first half and passed on, except for what costs nothing to make again:
views, constants, and casts of what the second half holds anyway. A call that makes both kinds of
gradient becomes two where it has a mask of the results that are wanted (:data:`MASKED`); the second
one is then given empty tensors in place of those of which it reads only the shape, so that it need
not hold a parameter. Any other such call stays whole in the first half, which passes its results
on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from msgspec.structs import replace as replace_struct

from piper.errors import DirectiveError
from piper.ir import body as ir
from piper.ir.body import GETITEM, Arg, Body, Const, Ref, TensorSpec, call_refs
from piper.ir.parts import Local, Part, Reference, assemble, renamed, slice_calls, spec_of
from piper.ir.views import PARTS, is_view

Position: TypeAlias = int
"""Of a call among the calls of a body."""

CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default"})


@dataclass(frozen=True, slots=True)
class Masked:
    """An operator of which argument ``mask`` says which results are wanted.

    Of the arguments ``shapes`` no result but the first reads more than shape and element type; the
    first reads all but ``unread``.
    """

    mask: int
    shapes: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()


MASKED: Mapping[str, Masked] = {
    "aten.convolution_backward.default": Masked(10, shapes=(2,)),
    "aten.linear_backward.default": Masked(3, shapes=(2,)),
    "aten.native_batch_norm_backward.default": Masked(9, shapes=(2,)),
    "aten.native_layer_norm_backward.default": Masked(7, shapes=(5, 6), unread=(6,)),
    "aten.native_group_norm_backward.default": Masked(9, shapes=(4,)),
    "aten._fused_rms_norm_backward.default": Masked(5, shapes=(4,)),
    "aten.grid_sampler_2d_backward.default": Masked(6),
    "aten.grid_sampler_3d_backward.default": Masked(6),
}
"""Operators that skip the work for results that are not wanted."""


@dataclass(frozen=True, slots=True)
class Half:
    """One half: its body, the locals that fill the body's inputs, the whole backward's random slots
    that fill its own.
    """

    body: Body
    inputs: tuple[Local, ...]
    rng: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Halves:
    """Both halves of a backward whose inputs are the locals 0, 1, ….

    ``first`` makes the whole's results, then those of ``passed`` (with their specs) that are not
    among them; ``results`` are the results' locals. Inputs that nothing reads belong to ``first``.
    ``second`` makes the contributions. ``tied`` names the operators that make both a result and a
    contribution and cannot be split.
    """

    first: Half
    second: Half
    results: tuple[Local, ...]
    passed: Mapping[Local, TensorSpec]
    tied: tuple[str, ...]

    @property
    def idle(self) -> bool:
        """Whether nothing is left to compute for the second half."""
        return all(_is_cheap_target(c.target) for c in self.second.body.calls)


def halve(body: Body, contributed: Sequence[bool], bindings: Mapping[str, int]) -> Halves:
    """Cut *body*; ``contributed[i]`` says whether output i is a contribution. Some are, some are
    not.

    *bindings* are typical sizes of the symbols, to weigh what to pass.
    """
    unread = _unread(body)
    body = _split_masked(body, contributed)
    results, contributions = _outputs(body, contributed)
    calls, _ = slice_calls(body, results, ())
    cut = _Cut(body, set(calls), contributions)
    copies = _copies(cut, bindings)
    if copies:
        body, refs = _copied(body, copies)
        grown = set(calls) | set(slice_calls(body, refs.values(), ())[0])
        cut = _Cut(body, grown, contributions, refs)
    return cut.halves(results, unread)


def _unread(body: Body) -> list[Reference]:
    """Inputs that no call reads: they are there to keep the backward behind what makes them."""
    read = {ref for call in body.calls for ref in call_refs(call)} | set(body.outputs)
    return [ref for ref in range(len(body.inputs)) if ref not in read]


def _outputs(
    body: Body, contributed: Sequence[bool]
) -> tuple[tuple[Reference, ...], tuple[Reference, ...]]:
    """The references to the results, and to the contributions."""
    pairs = list(zip(body.outputs, contributed, strict=True))
    return tuple(ref for ref, c in pairs if not c), tuple(ref for ref, c in pairs if c)


class _Cut:
    """Assigns the calls of *body* to the halves. ``first`` are calls that results depend on;
    ``copies`` are copies of small views of what these make, by view.
    """

    def __init__(
        self,
        body: Body,
        first: set[Position],
        contributions: Sequence[Reference],
        copies: Mapping[Reference, Reference] | None = None,
    ) -> None:
        self.body, self.first, self.contributions = body, first, contributions
        self.copies = copies or {}
        self.count = len(body.inputs)
        self.second: set[Position] = set()
        self.inputs: set[Reference] = set()  # that the second half reads
        self.passed: set[Reference] = set()
        self._need(contributions)
        self._cast_again()

    def _need(self, refs: Iterable[Reference]) -> None:
        """The second half needs *refs*: give it the calls that make them, or pass them to it."""
        waiting = list(refs)
        while waiting:
            ref = waiting.pop()
            position = ref - self.count
            if position < 0:
                self.inputs.add(ref)
            elif ref in self.copies or self._shared(position):
                self.passed.add(ref)
            elif position not in self.second:
                self.second.add(position)
                waiting.extend(call_refs(self.body.calls[position]))

    def _shared(self, position: Position) -> bool:
        """Whether the result of a call is passed from the first half, not made in the second."""
        if self._is_cheap(position):
            return False
        call = self.body.calls[position]
        if call.target == GETITEM:
            source = call_refs(call)[0] - self.count
            if source >= 0 and source in self.first:
                self.first.add(position)
        return position in self.first

    def _is_cheap(self, position: Position) -> bool:
        call = self.body.calls[position]
        refs = call_refs(call)
        if call.target == GETITEM:
            return refs[0] >= self.count and self._is_cheap(refs[0] - self.count)
        return is_view(call.target) or (not refs and call.rng is None)

    def _cast_again(self) -> None:
        """Casts of what the second half holds anyway."""
        for ref in sorted(self.passed, reverse=True):
            call = self.body.calls[ref - self.count]
            if call.target not in CASTS or ref in self.copies:
                continue
            (source,) = call_refs(call)
            held = self.inputs | self.passed | {p + self.count for p in self.second}
            if source in held:
                self.passed.remove(ref)
                self.second.add(ref - self.count)

    def halves(self, results: tuple[Reference, ...], unread: Iterable[Reference]) -> Halves:
        """The bodies of the halves, values being numbered as references into the whole."""
        self._check_tensors()
        body, rng = self.body, tuple(range(self.body.num_rngs))
        passed = {self.copies.get(ref, ref): spec_of(body, ref) for ref in sorted(self.passed)}
        made = dict.fromkeys((*results, *passed))
        calls = sorted(self.first)
        reads = {r for p in calls for r in call_refs(body.calls[p]) if r < self.count}
        reads.update(ref for ref in made if ref < self.count)
        reads.update(unread)
        own = {ref: ref for ref in made if ref >= self.count}
        first = Part(body, rng, calls, {ref: ref for ref in sorted(reads)}, own)
        ends = {ref: ref for ref in sorted(self.inputs)}
        ends.update({ref: self.copies.get(ref, ref) for ref in sorted(self.passed)})
        wanted = {ref: ref for ref in self.contributions if ref not in ends}
        second = Part(body, rng, sorted(self.second), ends, wanted)
        returned = [ends.get(ref, ref) for ref in self.contributions]
        return Halves(
            _half(first, [*results, *(ref for ref in passed if ref not in results)]),
            _half(second, returned),
            results,
            passed,
            self._tied(),
        )

    def _check_tensors(self) -> None:
        for ref in sorted(self.passed):
            call = self.body.calls[ref - self.count]
            if call.results[0] is None:
                maker = (
                    self.body.calls[call_refs(call)[0] - self.count]
                    if call.target == GETITEM
                    else call
                )
                raise DirectiveError(
                    f"a result of {maker.target} that is not a tensor ties the gradients of activations to those of parameters"
                )

    def _tied(self) -> tuple[str, ...]:
        """Calls of several results, made in the first half, of which contributions are made."""
        found: dict[str, None] = {}
        for ref in sorted(self.passed):
            call = self.body.calls[ref - self.count]
            if call.target == GETITEM:
                found[self.body.calls[call_refs(call)[0] - self.count].target] = None
        return tuple(found)


def _half(part: Part, outputs: Sequence[Local]) -> Half:
    body, inputs, rng = assemble([part], outputs)
    return Half(body, inputs, rng)


def _is_cheap_target(target: str) -> bool:
    return target == GETITEM or is_view(target)


# --- calls that make both kinds of gradient -------------------------------------------------------


def _split_masked(body: Body, contributed: Sequence[bool]) -> Body:
    """*body* with two calls in place of each masked one that makes both results and what only
    contributions need.
    """
    results, _ = _outputs(body, contributed)
    first = set(slice_calls(body, results, ())[0])
    needed = slice_calls(body, body.outputs, ())[0]
    count = len(body.inputs)
    wanted: dict[Position, tuple[set[int], set[int]]] = {}
    for position in needed:
        call = body.calls[position]
        source = call_refs(call)[0] - count if call.target == GETITEM else -1
        if source >= 0 and body.calls[source].target in MASKED:
            now, later = wanted.setdefault(source, (set(), set()))
            (now if position in first else later).add(_index(call))
    straddling = {p: both for p, both in wanted.items() if all(both)}
    if not straddling:
        return body
    refs: dict[Reference, Reference] = {i: i for i in range(count)}
    second: dict[Position, Reference] = {}
    calls: list[ir.Call] = []
    for position, call in enumerate(body.calls):
        if position in straddling:
            now, later = straddling[position]
            calls.append(renamed(_first_of(call, now), refs, None))
            refs[count + position] = count + len(calls) - 1
            calls += _rest_of(call, later, body, refs, count + len(calls))
            second[position] = count + len(calls) - 1
            continue
        names: Mapping[Reference, Reference] = refs
        if call.target == GETITEM:
            source = call_refs(call)[0] - count
            if source in second and _index(call) in straddling[source][1]:
                names = {count + source: second[source]}
        calls.append(renamed(call, names, call.rng))
        refs[count + position] = count + len(calls) - 1
    outputs = tuple(refs[ref] for ref in body.outputs)
    return replace_struct(body, calls=tuple(calls), outputs=outputs)


def _index(call: ir.Call) -> int:
    index = call.args[1]
    assert isinstance(index, int), "getitem in a chunk's body takes a number"
    return index


def _first_of(call: ir.Call, wanted: set[int]) -> ir.Call:
    rule = MASKED[call.target]
    unread = rule.unread if wanted == {0} else ()
    args = tuple(None if i in unread else arg for i, arg in enumerate(call.args))
    return _masked(replace_struct(call, args=args), rule, wanted)


def _rest_of(
    call: ir.Call,
    wanted: set[int],
    body: Body,
    refs: Mapping[Reference, Reference],
    start: Reference,
) -> list[ir.Call]:
    """The calls for the results *wanted*: empty tensors, then the call itself. The first of them
    has the reference *start*.
    """
    rule = MASKED[call.target]
    args = list(renamed(call, refs, None).args)
    like = args[0]
    calls: list[ir.Call] = []
    for i in rule.shapes if 0 not in wanted else ():
        old = call.args[i]
        if isinstance(old, Ref):
            args[i] = Ref(start + len(calls))
            calls.append(_empty(spec_of(body, old.index), like))
    return [*calls, _masked(replace_struct(call, args=tuple(args)), rule, wanted)]


def _empty(spec: TensorSpec, like: Arg) -> ir.Call:
    dtype = ("dtype", Const("dtype", spec.dtype.value))
    return ir.Call("aten.new_empty.default", (like, ir.Sequence(spec.shape)), (dtype,), (spec,))


def _masked(call: ir.Call, rule: Masked, wanted: set[int]) -> ir.Call:
    mask = ir.Sequence(tuple(i in wanted for i in range(len(call.results))))
    args = (*call.args[: rule.mask], mask, *call.args[rule.mask + 1 :])
    results = tuple(spec if i in wanted else None for i, spec in enumerate(call.results))
    return replace_struct(call, args=args, results=results)


# --- small views of large tensors -----------------------------------------------------------------


def _copies(cut: _Cut, bindings: Mapping[str, int]) -> list[Reference]:
    """Views that the first half had better copy for the second, which would otherwise hold more
    than it reads.
    """
    body = cut.body
    uses: dict[Reference, list[Position]] = {}
    for position in sorted(cut.second):
        for ref in call_refs(body.calls[position]):
            uses.setdefault(ref, []).append(position)
    found: list[Reference] = []
    for root in sorted(cut.passed):
        final = _final_views(body, root, uses, frozenset(cut.contributions))
        views = sorted({_part_behind(body, v) for v in final} if final else {root})
        if root in views:
            continue
        size = sum(spec_of(body, v).nbytes(bindings) for v in views)
        if size < spec_of(body, root).nbytes(bindings):
            found += views
    return found


def _final_views(
    body: Body,
    root: Reference,
    uses: Mapping[Reference, Sequence[Position]],
    returned: frozenset[Reference],
) -> list[Reference] | None:
    """The views through which *root* is read; ``None`` if it is read as it is."""
    count, found = len(body.inputs), list[Reference]()
    waiting = [root]
    while waiting:
        ref = waiting.pop()
        readers = [body.calls[p] for p in uses.get(ref, ())]
        through = ref not in returned and all(_is_cheap_target(c.target) for c in readers)
        if through and readers:
            waiting.extend(count + p for p in uses[ref])
        elif ref == root:
            return None
        else:
            found.append(ref)
    return sorted(set(found))


def _part_behind(body: Body, ref: Reference) -> Reference:
    """The last part of something that the view *ref* was made of, or what it is a view of."""
    while (position := ref - len(body.inputs)) >= 0:
        call = body.calls[position]
        maker = (
            body.calls[call_refs(call)[0] - len(body.inputs)] if call.target == GETITEM else call
        )
        if maker.target.rsplit(".", 1)[0] in PARTS or not is_view(maker.target):
            break
        ref = call_refs(call)[0]
    return ref


def _copied(body: Body, views: Sequence[Reference]) -> tuple[Body, dict[Reference, Reference]]:
    """*body* with a copy of each of *views* at its end, and the copies' references by view."""
    end = len(body.inputs) + len(body.calls)
    clones = [ir.Call("aten.clone.default", (Ref(v),), (), (spec_of(body, v),)) for v in views]
    calls = (*body.calls, *clones)
    return replace_struct(body, calls=calls), {v: end + i for i, v in enumerate(views)}
