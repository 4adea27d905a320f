"""Offload: which values wait in host memory, and what the plan makes of it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn

import piper
from piper.errors import DirectiveError
from piper.ir.dag import Chunk, Comm, Dag, Pass, Role
from piper.ops.compute import Compute
from piper.ops.offload import CopyFromHost, CopyToHost, Fetch, Offload
from piper.ops.p2p import Send, Transfer
from piper.plan.account import account
from piper.plan.memory import Category


class Stages(nn.Module):
    """Three stages, of which the middle one's input is needed by its backward (a product of
    activations).
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x):
        for stage, layer in enumerate(self.layers):
            with piper.annotate("PP", stage):
                x = layer(x).tanh() * x
        return x


def captured(model: nn.Module | None = None, rows: int = 8, width: int = 6) -> Dag:
    batch = (randn(rows, width), randn(rows, width, seed=1))
    return piper.capture((model or Stages(width)).double(), mse, batch)


def copies(dag: Dag, kind: type) -> list[Comm]:
    return [comm for comm in dag.comms() if isinstance(comm.work, kind)]


def chunk(dag: Dag, pass_: Pass, stage: int, microbatch: int | None = None) -> Chunk:
    tags = {"PP": stage} if microbatch is None else {"PP": stage, "MB": microbatch}
    (found,) = (
        c for c in dag.chunks() if not c.derived and c.pass_ is pass_ and dict(c.tags) == tags
    )
    return found


CHAIN = piper.placements.chain([[0], [1], [2]])


def test_the_backward_reads_what_was_fetched():
    dag = piper.apply(captured(), [*CHAIN, piper.Offload({"PP": 1})])
    (out,), (back,) = copies(dag, Offload), copies(dag, Fetch)
    forward, backward = chunk(dag, Pass.FORWARD, 1), chunk(dag, Pass.BACKWARD, 1)
    assert back.inputs == out.outputs
    assert {dag.values[v].role for v in out.outputs} == {Role.HOST}
    assert set(back.outputs) <= set(backward.inputs)
    assert not set(out.inputs) & set(backward.inputs)
    assert (out.pass_, back.pass_) == (Pass.FORWARD, Pass.BACKWARD)
    assert out.tags == forward.tags == back.tags == backward.tags
    assert out.groups == back.groups == ((1,),)
    # What the forward made, and what arrived and the backward still needs.
    arrived = {v for c in copies(dag, Transfer) if c.pass_ is Pass.FORWARD for v in c.outputs}
    assert set(out.inputs) & set(forward.outputs)
    assert set(out.inputs) & arrived
    assert set(out.inputs) <= set(forward.outputs) | arrived
    for value, copy in zip(out.inputs, back.outputs, strict=True):
        assert dag.values[value].spec == dag.values[copy].spec


def test_other_regions_and_microbatches_keep_theirs():
    strategy = [*CHAIN, piper.Split({}, num_microbatches=2), piper.Offload({"PP": 1, "MB": 1})]
    dag = piper.apply(captured(), strategy)
    assert {c.tags for c in copies(dag, Fetch)} == {(("PP", 1), ("MB", 1))}


def test_one_pass_stands_for_the_region():
    one, two = (
        piper.apply(captured(), [*CHAIN, piper.Offload({"PP": 1, **more})])
        for more in ({}, {"PASS": "B"})
    )
    assert copies(one, Offload) == copies(two, Offload)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_it_does_not_matter_when_it_is_said(at):
    strategy = [
        piper.Split({}, num_microbatches=2),
        *CHAIN,
        *piper.schedules.one_f_one_b(num_stages=3, num_microbatches=2),
    ]
    at = [0, 1, len(strategy)][at]
    dag = piper.apply(captured(), [*strategy[:at], piper.Offload({}), *strategy[at:]])
    assert len(copies(dag, Fetch)) >= 6
    shown = {(c.label, len(c.inputs)) for c in (*copies(dag, Fetch), *copies(dag, Offload))}
    reference = piper.apply(captured(), [*strategy, piper.Offload({})])
    expected = {
        (c.label, len(c.inputs)) for c in (*copies(reference, Fetch), *copies(reference, Offload))
    }
    assert shown == expected


def test_what_another_region_keeps_anyway_stays():
    """On one device, a stage's output is saved by the next: it is moved only if both regions are
    offloaded.
    """
    dag = captured()
    one = piper.apply(dag, [piper.Offload({"PP": 1})])
    both = piper.apply(dag, [piper.Offload({"PP": [1, 2]})])

    def moved(found: Dag) -> set[int]:
        return {v for c in copies(found, Offload) for v in c.inputs}

    shared = set(chunk(dag, Pass.FORWARD, 1).outputs) & set(chunk(dag, Pass.BACKWARD, 2).inputs)
    shared = {v for v in shared if dag.producers[v] == chunk(dag, Pass.FORWARD, 1).id}
    assert moved(piper.apply(dag, [])) == set()
    assert shared
    # Placement on one device happens when the plan is made.
    assert piper.verify(piper.plan(one))
    assert piper.verify(piper.plan(both))
    planned_one = {v for c in copies(piper.plan(one).dag, Offload) for v in c.inputs}
    planned_both = {v for c in copies(piper.plan(both).dag, Offload) for v in c.inputs}
    assert not shared & planned_one
    assert shared <= planned_both


class Returning(nn.Module):
    """Stages whose output is what their own backward needs (tanh)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x):
        for stage, layer in enumerate(self.layers):
            with piper.annotate("PP", stage):
                x = layer(x).tanh()
        return x


class Viewing(nn.Module):
    """Saves views: of a parameter, of the batch, and two of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.project = nn.Linear(6, 12, bias=False)

    def forward(self, x):
        with piper.annotate("PP", 0):
            left, right = self.project(x.view(-1, 2, 3).flatten(1) * 2).chunk(2, dim=1)
            x = left * right
        with piper.annotate("PP", 1):
            return x @ self.weight.t().view(6, 6)


def test_memory_is_moved_once_and_only_if_that_frees_it():
    dag = captured(Viewing())
    dag = piper.apply(dag, [*piper.placements.chain([[0], [1]]), piper.Offload({})])
    plan = piper.plan(dag)
    piper.verify(plan)
    first, second = account(plan)
    rows, width, itemsize = 8, 6, 8
    # Stage 0: its own input (twice the batch, 8 × 6), and the projection (8 × 12) of which both
    # halves are saved.
    assert first.highest[Category.HOST] == rows * (width + 2 * width) * itemsize
    # Stage 1: what arrived; and what the loss saved of its difference with the targets, if it is
    # not a view of the batch.
    for device in plan.devices:
        for instruction in device.instructions:
            if isinstance(instruction, CopyToHost):
                roles = {device.slots[s].role for s in instruction.inputs}
                assert roles == {Role.ACTIVATION}
    assert second.highest[Category.HOST] > 0


def test_what_is_sent_is_sent_from_the_device():
    """The device's own copy of a stage's output serves the send, and is given up after the later of
    send and copy.
    """
    strategy = [*CHAIN, piper.Split({}, num_microbatches=2), piper.Offload({})]
    dag = piper.apply(captured(Returning()), strategy)
    moved = {v for c in copies(dag, Offload) for v in c.inputs}
    sent = {v for c in copies(dag, Transfer) if c.pass_ is Pass.FORWARD for v in c.inputs}
    assert moved & sent
    plan = piper.plan(dag)
    piper.verify(plan)
    for mine in plan.devices[:2]:
        slots = {n for n, info in enumerate(mine.slots) if info.value in moved & sent}
        assert slots
        for slot in slots:
            uses = [n for n, i in enumerate(mine.instructions) if slot in i.reads()]
            kinds = {type(mine.instructions[n]) for n in uses}
            assert {Send, CopyToHost} <= kinds
            (freed,) = (n for n, i in enumerate(mine.instructions) if slot in i.frees())
            assert freed > max(uses)


def test_the_planner_fetches_before_the_chunk_before():
    """While one backward runs, what the next one reads is on its way; not more, and not before the
    forwards are done.
    """
    strategy = piper.strategies.pipeline("gpipe", [[0], [1], [2]], 8)
    dag = replace(captured(rows=8, width=512), batch_size=4096)
    plan = piper.plan(piper.apply(dag, [*strategy, piper.Offload({})]))
    piper.verify(plan)
    nodes = plan.dag.nodes
    for mine in plan.devices:
        events = [i for i in mine.instructions if isinstance(i, (Compute, CopyFromHost))]
        backwards = [
            n
            for n, i in enumerate(events)
            if isinstance(i, Compute) and nodes[i.node].pass_ is Pass.BACKWARD
        ]
        forwards = [
            n
            for n, i in enumerate(events)
            if isinstance(i, Compute) and nodes[i.node].pass_ is Pass.FORWARD
        ]
        fetches = [n for n, i in enumerate(events) if isinstance(i, CopyFromHost)]
        assert len(fetches) >= 8
        assert min(fetches) > forwards[-2]
        for before, backward in pairwise(backwards):
            tags = nodes[events[backward].node].tags
            (fetch,) = {n for n in fetches if nodes[events[n].node].tags == tags}
            assert fetch < before


def test_fetch_bytes_bound_what_is_early():
    strategy = [*piper.strategies.pipeline("gpipe", [[0], [1], [2]], 8), piper.Offload({})]
    dag = piper.apply(captured(rows=16), strategy)

    def peak(fetch_bytes: int | None) -> int:
        plan = piper.plan(dag, fetch_bytes=fetch_bytes)
        piper.verify(plan)
        return max(memory.by_category[Category.ACTIVATIONS] for memory in account(plan)[:1])

    assert peak(0) < peak(None) <= peak(2**30)


def test_orders_may_name_the_copies():
    names = [[{"COMM": "offload", "PP": 0, "MB": 1}], [{"COMM": "fetch", "PP": 0, "MB": 0}]]
    strategy = [*CHAIN, piper.Split({}, num_microbatches=2), piper.Offload({}), piper.Order(names)]
    plan = piper.plan(piper.apply(captured(), strategy))
    piper.verify(plan)
    nodes = plan.dag.nodes
    places = {
        (type(i), dict(nodes[i.node].tags)["MB"]): n
        for n, i in enumerate(plan.devices[0].instructions)
        if isinstance(i, (CopyToHost, CopyFromHost))
    }
    assert places[CopyToHost, 1] < places[CopyFromHost, 0]


def test_what_recomputation_still_saves_is_moved():
    strategy = [*CHAIN, piper.Offload({"PP": 1}), piper.Recompute({"PP": 1})]
    dag = piper.apply(captured(), strategy)
    (out,) = copies(dag, Offload)
    arrived = {v for c in copies(dag, Transfer) for v in c.outputs}
    assert set(out.inputs) <= arrived
    other = piper.apply(captured(), [*CHAIN, piper.Recompute({"PP": 1}), piper.Offload({"PP": 1})])
    assert [c.inputs for c in copies(other, Offload)] == [out.inputs]


class Frozen(nn.Module):
    """Region 0 is not differentiated; region 1's backward reads nothing but gradients."""

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = x * 2
        with piper.annotate("PP", 1):
            return x + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))


def test_a_region_that_saves_nothing_is_refused():
    with pytest.raises(DirectiveError, match=r"directive 0, Offload.*matches no region that saves"):
        piper.apply(captured(Frozen()), [piper.Offload({"PP": 0})])


def test_communication_is_refused():
    strategy = [*CHAIN, piper.Offload({"COMM": "transfer"})]
    with pytest.raises(DirectiveError, match="communication, sums and updates follow"):
        piper.apply(captured(), strategy)


def test_a_region_is_offloaded_once():
    strategy = [piper.Offload({"PP": 1}), piper.Offload({"PP": [0, 1]})]
    with pytest.raises(DirectiveError, match="offloaded twice: by directive 0 and by this one"):
        piper.apply(captured(), strategy)


def test_an_evaluation_saves_nothing_and_is_not_refused():
    from piper.capture import capture_with_constants

    batch = (randn(8, 6), randn(8, 6, seed=1))
    found = capture_with_constants(Stages().double(), mse, batch, grad=False)
    dag = piper.apply(found.dag, [*CHAIN, piper.Offload({})])
    assert not copies(dag, Offload)
    piper.verify(piper.plan(dag))
