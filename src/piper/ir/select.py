"""Filters: which nodes a directive speaks of.

A filter maps tag names to an index, a list of indices, ``"*"`` (any index) or ``None`` (node
without that tag). ``PASS`` and ``COMM`` are tags too: ``{"PP": 0, "PASS": "F"}``, ``{"COMM":
"all_reduce"}``. ``{}`` matches all. A filter without ``COMM`` matches compute nodes only.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import TypeAlias

from piper.errors import FilterError, nearest
from piper.ids import NodeId
from piper.ir.dag import Comm, Dag, GradientUse, Node, Pass

FilterValue: TypeAlias = int | str | Sequence[int | str] | None
Filter: TypeAlias = Mapping[str, FilterValue]
_Scalar: TypeAlias = int | str | None

PASS, COMM, ANY = "PASS", "COMM", "*"

MICROBATCH = "MB"
"""What a ``Split`` calls its tag if nothing else is said; no region can have the name."""

_OF_UPDATES = {"all_reduce", "reduce_scatter", "refresh", "transfer"}
"""Kinds of communication by which gradients become updated parameters."""


class Selector:
    """Finds the nodes of one DAG that match filters; each filter costs a dictionary look-up.

    Filters may name the tags *elsewhere* too, with their indices, which match nothing.
    """

    def __init__(self, dag: Dag, elsewhere: Mapping[str, Collection[int]] | None = None) -> None:
        self._dag = dag
        self._tags = {n.id: _all_tags(n) for n in dag.nodes.values()}
        self._derived = {c.id for c in dag.chunks() if c.derived}
        self._tables: dict[tuple[str, ...], dict[tuple[_Scalar, ...], list[NodeId]]] = {}
        self._known = known_tags(dag)
        self._named = {name: {*indices} for name, indices in self._known.items()}
        for name, indices in (elsewhere or {}).items():
            self._named.setdefault(name, set()).update(indices)

    def find(self, filter_: Filter, where: Callable[[Node], bool] | None = None) -> list[NodeId]:
        """The matching nodes in node order; derived compute nodes match only if the filter says
        ``UPDATE``.

        Raises :class:`FilterError` if a region, index or microbatch of the filter exists nowhere. A
        pass that a region does not have matches nothing.
        """
        self._check(filter_)
        if COMM in filter_ and filter_[COMM] is None:
            filter_ = {name: value for name, value in filter_.items() if name != COMM}
        names = tuple(sorted(filter_))
        table = self._table(names)
        found: list[NodeId] = []
        for values in product(*(_alternatives(filter_[name]) for name in names)):
            found.extend(table.get(values, ()))
        unique = sorted(set(found)) if len(found) > 1 else found
        nodes = self._dag.nodes
        return [n for n in unique if where is None or where(nodes[n])]

    def _table(self, names: tuple[str, ...]) -> dict[tuple[_Scalar, ...], list[NodeId]]:
        if names not in self._tables:
            table: dict[tuple[_Scalar, ...], list[NodeId]] = {}
            for node, tags in self._tags.items():
                if (COMM in tags) != (COMM in names):
                    continue
                if node in self._derived and PASS not in names:
                    continue
                for key in product(*(self._keys(node, name) for name in names)):
                    table.setdefault(key, []).append(node)
            self._tables[names] = table
        return self._tables[names]

    def _keys(self, node: NodeId, name: str) -> tuple[_Scalar, ...]:
        """What *node* answers to under tag *name*."""
        value = self._tags[node].get(name)
        if value is None or (name == PASS and node in self._derived):
            return (value,)
        if value in (Pass.BACKWARD_INPUT.value, Pass.BACKWARD_WEIGHT.value):
            return (value, Pass.BACKWARD.value, ANY)
        return (value, ANY)

    def _check(self, filter_: Filter) -> None:
        for name, value in filter_.items():
            if name == PASS:
                _check_words(name, value, [p.value for p in Pass])
            elif name == COMM:
                _check_words(name, value, [None, *sorted(self._kinds())])
            else:
                self._check_tag(filter_, name, value)

    def _kinds(self) -> set[str]:
        """The kinds of communication that there are, or may be in the plan of the step that uses
        what this one keeps.
        """
        found = {node.work.kind for node in self._dag.comms()}
        return found | _OF_UPDATES if self._dag.gradient_use is GradientUse.KEEP else found

    def _check_tag(self, filter_: Filter, name: str, value: FilterValue) -> None:
        if value is None:
            return
        if name not in self._named:
            raise FilterError(
                f"filter {dict(filter_)} names tag {name!r}, which no node has"
                f"{self._maker(name)}; tags: {self.describe_tags()}"
            )
        for index in _alternatives(value):
            if index != ANY and index not in self._named[name]:
                raise FilterError(
                    f"filter {dict(filter_)}: no node has {name}={index!r}{self._count(name, index)}; tags: {self.describe_tags()}"
                )

    def _maker(self, name: str) -> str:
        """What gives nodes the tag *name*, or one that may be meant."""
        if name != MICROBATCH:
            return nearest(name, self._known)
        if not self._dag.splits:
            return (
                f"; Split({{}}, dim_name={name!r}, num_microbatches=…) makes it, and comes before the directives that name it, Orders and all "
                "placements by microbatch among them"
            )
        made = [split.name for split in self._dag.splits]
        return f"; the strategy's Split gives {' and '.join(map(repr, made))}: use one name in both"

    def _count(self, name: str, index: _Scalar) -> str:
        """Why there is no such *index* of a tag that there is."""
        if isinstance(index, str):
            number = f": write {name!r}: {int(index)}" if index.isdecimal() else ""
            return f" ({index!r} is text; regions and microbatches are numbered{number})"
        known = self._known[name]
        if any(split.name == name for split in self._dag.splits):
            return f" (Split makes {len(known)} microbatches)"
        return f" (the model has {len(known)} of them; a strategy names those that there are, all of them)"

    def describe_tags(self) -> str:
        """The tags of the DAG with their indices, for error messages."""
        if not self._known:
            return "the model has no annotated region (use piper.annotate or piper.annotate_module)"
        return ", ".join(f"{name} {_ranges(found)}" for name, found in sorted(self._known.items()))


def known_tags(dag: Dag) -> dict[str, set[int]]:
    """The tags of a DAG, with their indices."""
    known: dict[str, set[int]] = {}
    for node in dag.nodes.values():
        for name, index in node.tags:
            known.setdefault(name, set()).add(index)
    return known


def _all_tags(node: Node) -> dict[str, _Scalar]:
    tags: dict[str, _Scalar] = dict(node.tags)
    tags[PASS] = node.pass_.value
    if isinstance(node, Comm):
        tags[COMM] = node.work.kind
    return tags


def _alternatives(value: FilterValue) -> Iterable[_Scalar]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _check_words(name: str, value: FilterValue, words: Sequence[str | None]) -> None:
    named = [word for word in words if word is not None]
    for word in _alternatives(value):
        if word != ANY and word not in words:
            raise FilterError(
                f"filter value {name}={word!r} is unknown{nearest(str(word), named)}; "
                f"known: {', '.join(named) or 'none in this DAG'}"
            )


def _ranges(indices: set[int]) -> str:
    ordered = sorted(indices)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}–{ordered[-1]}"
    return ", ".join(map(str, ordered))
