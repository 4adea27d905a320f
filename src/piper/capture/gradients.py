"""Parameter gradients as sums of contributions, one per chunk.

A parameter used in several places (tied weights, ``x @ W @ W``) has a gradient that the graph adds
up. The additions at the end of that sum are cut away: each chunk contributes what it computed, and
the sum is left to whoever places the chunks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.fx
from torch._ops import OpOverload

from piper.capture.annotate import RegionPath
from piper.capture.joint import Joint, ParameterInput
from piper.capture.operators import ADD, is_size, name, same_shape, tensor_inputs
from piper.capture.precision import is_cast
from piper.capture.regions import Layout
from piper.ir.dag import Pass

Node: TypeAlias = torch.fx.Node


@dataclass(frozen=True, slots=True)
class Gradients:
    """``terms``: per parameter, by its first name, what its gradient is the sum of. ``cut``: the
    additions.
    """

    terms: dict[str, list[Node]]
    cut: frozenset[Node]

    def nodes(self) -> Iterator[Node]:
        """All terms."""
        for terms in self.terms.values():
            yield from terms


def find_gradients(joint: Joint) -> Gradients:
    """Terms of each gradient; the gradients of a tied parameter's names are terms of one sum."""
    first = {name: state.names[0] for state in joint.parameters for name in state.names}
    uses: dict[Node, int] = {}
    for _, node in joint.gradients:
        if node is not None:
            uses[node] = uses.get(node, 0) + 1
    terms: dict[str, list[Node]] = {}
    cut: set[Node] = set()
    for parameter, node in joint.gradients:
        if node is None:
            continue
        found = [node] if uses[node] > 1 else _terms(node, joint.module.graph.output_node(), cut)
        terms.setdefault(first[parameter], []).extend(found)
    return Gradients({p: [own_node(n) for n in ns] for p, ns in terms.items()}, frozenset(cut))


def _terms(node: Node, reader: Node, cut: set[Node]) -> list[Node]:
    """What *node* adds up, if *reader* alone reads the sum; the additions go to *cut*."""
    if name(node) != ADD or len(node.args) != 2 or node.kwargs or set(node.users) != {reader}:
        return [node]
    parts = [a for a in node.args if isinstance(a, Node) and not is_size(a) and same_shape(a, node)]
    if len(parts) != 2:
        return [node]
    cut.add(node)
    return [term for part in parts for term in _terms(part, node, cut)]


def own_node(node: Node) -> Node:
    """*node*, or a copy of it if it is an input or a constant, so that a chunk can produce it."""
    if node.op == "call_function":
        return node
    return _insert_after(node, torch.ops.aten.alias.default, (node,))


def _insert_after(node: Node, target: OpOverload, args: tuple[Node, ...]) -> Node:
    graph = node.graph
    with graph.inserting_after(node):
        made = graph.call_function(target, args)
    made.meta = {"val": node.meta["val"], "partitioner_tag": node.meta.get("partitioner_tag")}
    return made


def bring_home(gradients: Gradients, joint: Joint, layout: Layout) -> Gradients:
    """Give every contribution to the backward of a region that uses its parameter.

    The gradient of ``x + bias`` with respect to an unreduced ``bias`` is the very gradient that
    arrives from the next region; without this, that region would own the contribution of a
    parameter that it does not have. Adds the new nodes to *layout*.
    """
    users = _using_regions(joint, layout)
    terms: dict[str, list[Node]] = {}
    for parameter, nodes in gradients.terms.items():
        homes = users.get(parameter, ())
        terms[parameter] = [_at_home(node, homes, layout) for node in nodes]
    return Gradients(terms, gradients.cut)


def _at_home(node: Node, homes: tuple[RegionPath, ...], layout: Layout) -> Node:
    path, _ = layout.keys[node]
    if not homes or path in homes:
        return node
    copy = _insert_after(node, torch.ops.aten.alias.default, (node,))
    layout.keys[copy] = (homes[0], Pass.BACKWARD)
    return copy


def _using_regions(joint: Joint, layout: Layout) -> dict[str, tuple[RegionPath, ...]]:
    """Regions whose forward reads each parameter, in graph order."""
    first = {name: state.names[0] for state in joint.parameters for name in state.names}
    reached: dict[Node, set[str]] = {
        node: {first[source.name]}
        for node, source in joint.inputs.items()
        if isinstance(source, ParameterInput)
    }
    users: dict[str, dict[RegionPath, None]] = {}
    for node in joint.module.graph.nodes:
        found = {p for source in tensor_inputs(node) for p in reached.get(source, ())}
        if node in layout.sunk:
            reached[node] = found
        elif node in layout.keys and layout.keys[node][1] is Pass.FORWARD:
            for parameter in found:
                users.setdefault(parameter, {})[layout.keys[node][0]] = None
    return {parameter: tuple(paths) for parameter, paths in users.items()}


def contributions(
    gradients: Gradients,
    layout: Layout,
    chunk_of: dict[Node, int],
    reduce: torch.dtype | None = None,
) -> Mapping[int, list[tuple[str, Node]]]:
    """Per chunk, the parameters that it contributes to and the nodes that hold the contributions.

    Several terms in one chunk are added there. With *reduce*, floating-point terms are cast to that
    type first, each by itself: so the sum does not depend on which of them are in one chunk. Adds
    the new nodes to *layout* and *chunk_of*.
    """
    found: dict[int, list[tuple[str, Node]]] = {}
    for parameter, terms in gradients.terms.items():
        by_chunk: dict[int, list[Node]] = {}
        for term in terms:
            summed = _cast(term, reduce, layout, chunk_of)
            by_chunk.setdefault(chunk_of[term], []).append(summed)
        for chunk, parts in by_chunk.items():
            found.setdefault(chunk, []).append((parameter, _added(parts, layout, chunk_of)))
    return found


def _cast(term: Node, dtype: torch.dtype | None, layout: Layout, chunk_of: dict[Node, int]) -> Node:
    value = term.meta["val"]
    if dtype is None or value.dtype == dtype or not is_cast(value):
        return term
    made = _insert_after(term, torch.ops.aten._to_copy.default, (term,))  # noqa: SLF001
    made.kwargs = {"dtype": dtype}
    made.meta["val"] = value.to(dtype)
    layout.keys[made], chunk_of[made] = layout.keys[term], chunk_of[term]
    return made


def _added(parts: list[Node], layout: Layout, chunk_of: dict[Node, int]) -> Node:
    total = parts[0]
    for part in parts[1:]:
        later = max(total, part)
        added = _insert_after(later, torch.ops.aten.add.Tensor, (total, part))
        layout.keys[added] = layout.keys[later]
        chunk_of[added] = chunk_of[later]
        total = added
    return total
