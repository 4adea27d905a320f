"""From the joint graph to the training DAG on one device: chunks by region path and pass."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.fx

from piper.brief import brief, count
from piper.capture.batch import Batch
from piper.capture.bodies import check_operators
from piper.capture.constants import find_constants
from piper.capture.dag import build_dag
from piper.capture.gradients import bring_home, contributions, find_gradients, own_node
from piper.capture.joint import Joint, SeedInput
from piper.capture.operators import tensor_inputs
from piper.capture.regions import Layout, lay_out
from piper.capture.segments import segment
from piper.ir.dag import Dag, Pass

Node: TypeAlias = torch.fx.Node


def _brief_captured(it: "Captured") -> str:
    return f"{it.dag!r}, {count(len(it.constants), 'constant')}"


@brief(_brief_captured)
@dataclass(frozen=True, slots=True)
class Captured:
    """The DAG, and the values of its constant buffers by name."""

    dag: Dag
    constants: Mapping[str, torch.Tensor]


def partition(joint: Joint, batch: Batch) -> Captured:
    """Cut *joint* into chunks; its graph is changed on the way.

    A chunk is a maximal convex set of nodes with one region path and one pass.
    """
    check_operators(joint.module.graph.nodes)
    constants = find_constants(joint.module)
    joint = replace(
        joint,
        loss=own_node(joint.loss),
        weight=None if joint.weight is None else own_node(joint.weight),
        buffer_updates=tuple((name, own_node(node)) for name, node in joint.buffer_updates),
    )
    gradients = find_gradients(joint)
    outputs = frozenset((*results(joint), *gradients.nodes()))
    layout = lay_out(joint, outputs, gradients.cut)
    gradients = bring_home(gradients, joint, layout)
    chunk_of = _chunks(joint, layout)
    reduce = None if joint.precision is None else joint.precision.reduce
    parts = contributions(gradients, layout, chunk_of, reduce)
    dag = build_dag(joint, batch, layout, constants, chunk_of, parts)
    return Captured(dag, constants.tensors)


def results(joint: Joint) -> Iterable[Node]:
    """Loss, weight and new buffer values."""
    yield joint.loss
    if joint.weight is not None:
        yield joint.weight
    yield from (node for _, node in joint.buffer_updates)


def _chunks(joint: Joint, layout: Layout) -> dict[Node, int]:
    """The chunk number of each node of *layout*, numbered in topological order."""
    nodes = [n for n in joint.module.graph.nodes if n in layout.keys]
    chunk_of = _segmented(nodes, layout)
    gradient = _gradients(joint)
    backward = {chunk_of[n] for n in nodes if n in gradient}
    # What the backward computes from saved values alone, if it did not fit into a backward chunk,
    # is forward work: a chunk that reads no gradient is not a backward chunk.
    early = [n for n in nodes if layout.keys[n][1] is Pass.BACKWARD and chunk_of[n] not in backward]
    if not early:
        return chunk_of
    for node in early:
        layout.keys[node] = (layout.keys[node][0], Pass.FORWARD)
    return _segmented(nodes, layout)


def _segmented(nodes: list[Node], layout: Layout) -> dict[Node, int]:
    index = {node: i for i, node in enumerate(nodes)}
    producers = [[index[p] for p in layout.producers(node)] for node in nodes]
    numbers = segment([layout.keys[node] for node in nodes], producers)
    return dict(zip(nodes, numbers, strict=True))


def _gradients(joint: Joint) -> set[Node]:
    """The nodes that depend on the loss's gradient."""
    found = {n for n, source in joint.inputs.items() if isinstance(source, SeedInput)}
    for node in joint.module.graph.nodes:
        if any(source in found for source in tensor_inputs(node)):
            found.add(node)
    return found
