"""Half backwards: what the rewrite does to chunks, bodies, values and memory. That the numbers stay
the same: tests/equality/test_split_backward.py.
"""

from collections.abc import Sequence

import pytest
import torch
from tests.cases.equal import mse, randn
from tests.equality.split_matrix import (
    WIDTH,
    Conv,
    Frozen,
    Fused,
    Nested,
    Normed,
    Square,
    Stages,
)
from tests.support.zero_bubble import order
from torch import nn

import piper
from piper.directives.base import Directive
from piper.errors import DirectiveError
from piper.ir.body import call_refs
from piper.ir.dag import Chunk, Dag, Role
from piper.ops.compute import Call, Compute
from piper.planner import plan
from piper.verify import verify

HALVES = piper.Order([[{"PASS": ["BI", "BW"]}]])
"""Splits every backward and orders nothing."""


def stages(block, count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Stages(count, block)


def image(rows: int = 4):
    return randn(rows, 2, 3, 3).float(), randn(rows, 2, 3, 3, seed=1).float()


def vectors(rows: int = 4):
    return randn(rows, WIDTH).float(), randn(rows, WIDTH, seed=1).float()


def dag_of(model: nn.Module, *strategy: Directive, batch=None) -> Dag:
    """The DAG of *model*; its plan is verified."""
    dag = piper.apply(piper.capture(model, mse, batch or vectors()), strategy)
    verify(plan(dag))
    return dag


def chunks(dag: Dag) -> dict[str, list[Chunk]]:
    """The core chunks by label."""
    found: dict[str, list[Chunk]] = {}
    for chunk in dag.chunks():
        if not chunk.derived:
            found.setdefault(chunk.label, []).append(chunk)
    return found


def one(dag: Dag, label: str) -> Chunk:
    (chunk,) = chunks(dag)[label]
    return chunk


def calls(dag: Dag, *found: Chunk) -> list[str]:
    """Names of the operators that chunks call."""
    bodies = [dag.bodies[c.work.body] for c in found if isinstance(c.work, Call)]
    return [call.target.split(".")[1] for body in bodies for call in body.calls]


def roles(dag: Dag, values: Sequence[int]) -> list[str]:
    return [dag.values[v].role.value for v in values]


BLOCKS = {
    "square": lambda _: Square(),
    "fused": lambda _: Fused(),
    "normed": lambda _: Normed(),
    "nested": lambda _: Nested(),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_halves_share_no_product_and_no_kind_of_gradient(name):
    model = stages(BLOCKS[name])
    whole, split = dag_of(model), dag_of(model, HALVES)
    for label, inputs in chunks(split).items():
        if not label.startswith("BI"):
            continue
        weights = chunks(split).get(label.replace("BI", "BW"), [])
        before = chunks(whole)[label.replace("BI", "B")]
        assert all(r == "activation" for c in inputs for r in roles(split, c.outputs))
        assert all(r == "contribution" for c in weights for r in roles(split, c.outputs))
        products = [calls(split, *part).count("mm") for part in (inputs, weights)]
        assert min(products) > 0
        assert sum(products) == calls(whole, *before).count("mm")
    made = {p: len(vs) for p, vs in whole.contributions.items()}
    assert {p: len(vs) for p, vs in split.contributions.items()} == made


def test_each_chunk_of_a_region_is_split_on_its_own():
    split = dag_of(stages(lambda _: Nested()), HALVES)
    assert len(chunks(split)["BI PP=1"]) == len(chunks(split)["BW PP=1"]) == 2
    assert len(chunks(split)["BI PP=1 EP=0"]) == len(chunks(split)["BW PP=1 EP=0"]) == 1
    # In the first stage the last gradient goes nowhere: that chunk is all BW. It makes the
    # contribution of both uses.
    assert len(chunks(split)["BI PP=0"]) == len(chunks(split)["BW PP=0"]) == 1
    assert len(chunks(split)["BI PP=0 EP=0"]) == len(chunks(split)["BW PP=0 EP=0"]) == 1


def test_the_first_stage_has_no_bi_and_a_frozen_one_no_bw():
    split = dag_of(stages(Frozen, 4), HALVES)
    assert "BI PP=1" not in chunks(split)
    assert "BW PP=2" not in chunks(split)
    assert calls(split, one(split, "BW PP=1")).count("mm") == 1
    assert calls(split, one(split, "BI PP=3")).count("mm") == 1


def test_calls_that_make_both_kinds_are_split_by_their_mask():
    split = dag_of(stages(lambda _: Conv()), HALVES, batch=image())
    masks = {}
    for pass_ in ("BI", "BW"):
        body = split.bodies[one(split, f"{pass_} PP=1").work.body]
        for call in body.calls:
            if call.target.endswith("_backward.default"):
                mask = call.args[
                    9 if "batch_norm" in call.target else 10 if "conv" in call.target else 0
                ]
                masks.setdefault(call.target, []).append((pass_, getattr(mask, "items", None)))
    convolutions = masks["aten.convolution_backward.default"]
    assert convolutions == [
        *[("BI", (True, False, False))] * 2,
        ("BW", (False, True, True)),
        ("BW", (False, True, False)),  # the convolution without a bias
    ]
    norms = masks["aten.native_batch_norm_backward.default"]
    assert norms == [("BI", (True, False, False)), ("BW", (False, True, True))]


@pytest.mark.parametrize("block", [Conv, Normed, Square])
def test_parameters_are_gathered_for_the_half_that_reads_them(block):
    """The gradient of W in x @ W, of a convolution's and of a norm's weight depends on none of
    them.
    """
    batch = image(8) if block is Conv else vectors(8)
    sharded = [
        *piper.placements.chain([[0, 1], [2, 3]]),
        piper.Replicate({}, shard_params=True),
        piper.Split({}, num_microbatches=2),
    ]
    model = stages(lambda _: block())
    for strategy in ([*sharded, HALVES], [*sharded[:2], sharded[3], HALVES, sharded[2]]):
        split = dag_of(model, *strategy, batch=batch)
        gathers = [c.label for c in split.comms() if c.work.kind == "all_gather"]
        assert "all_gather BI PP=1 MB=0" in gathers
        assert not [label for label in gathers if " BW PP=1" in label]


def test_a_bias_of_a_norm_is_read_by_no_half():
    """Torch's backward takes it for its shape alone."""
    split = dag_of(stages(lambda _: Normed()), HALVES)
    read = {split.values[v].name for p in ("BI", "BW") for v in one(split, f"{p} PP=1").inputs}
    assert "blocks.1.layer.weight" in read
    assert "blocks.1.layer.bias" not in read


class Cat(nn.Module):
    """The backward of ``cat`` cuts a gradient into parts, of which the weight of one branch needs
    one, a quarter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.small, self.back = (
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        return self.back(torch.cat([self.small(x), x.sin(), x.cos(), x.exp()], -1))


def test_a_small_part_of_a_large_value_is_copied():
    """Else BW would keep the memory of the whole until it runs."""
    split = dag_of(stages(lambda _: Cat()), HALVES)
    first, second = one(split, "BI PP=1"), one(split, "BW PP=1")
    passed = [v for v in second.inputs if v in first.outputs]
    body = split.bodies[first.work.body]
    refs = [body.outputs[first.outputs.index(v)] for v in passed]
    copied, gradient = ("aten.clone.default", WIDTH), ("aten.mse_loss_backward.default", WIDTH)
    found = {
        (body.calls[ref - len(body.inputs)].target, split.values[v].spec.shape[-1])
        for ref, v in zip(refs, passed, strict=True)
    }
    assert found == {copied, gradient}


def test_views_are_made_again_and_their_source_passed_once():
    split = dag_of(stages(lambda _: Fused()), HALVES)
    first, second = one(split, "BI PP=1"), one(split, "BW PP=1")
    body = split.bodies[first.work.body]
    for value in second.inputs:
        if value in first.outputs:
            ref = body.outputs[first.outputs.index(value)]
            assert body.calls[ref - len(body.inputs)].target not in (
                "aten.t.default",
                "aten.reshape.default",
                "aten.transpose.int",
            )


def test_no_half_reads_or_makes_what_it_need_not():
    for block in BLOCKS.values():
        split = dag_of(stages(block), HALVES)
        for pass_ in ("BI", "BW"):
            for chunk in chunks(split)[f"{pass_} PP=1"]:
                body = split.bodies[chunk.work.body]
                read = {r for c in body.calls for r in call_refs(c)} | set(body.outputs)
                assert read >= set(range(len(body.inputs)))
                assert len(set(chunk.inputs)) == len(chunk.inputs)
                assert all(v in split.consumers or v in split.contributions for v in chunk.outputs)


def test_microbatches_share_the_bodies_of_halves():
    split = dag_of(
        stages(lambda _: Square(), 4), piper.Split({}, num_microbatches=4), HALVES, batch=vectors(8)
    )
    bodies = {
        (c.label[:2], c.work.body)
        for name, cs in chunks(split).items()
        for c in cs
        if " PP=1" in name or " PP=2" in name
    }
    assert len([b for p, b in bodies if p == "BI"]) == len([b for p, b in bodies if p == "BW"]) == 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_place_of_recompute_and_split_does_not_matter(at):
    """Whatever is computed again is computed once for both halves, by BI if BI needs it."""
    strategy = [piper.Split({}, num_microbatches=2), HALVES]
    strategy.insert(at, piper.Recompute({}))
    model = stages(lambda _: Fused())
    split = dag_of(model, *strategy, batch=vectors(8))
    plain = dag_of(model, *strategy[:at], *strategy[at + 1 :], batch=vectors(8))
    whole = dag_of(model, piper.Recompute({}))
    found = [calls(split, one(split, f"{p} PP=1 MB=0")) for p in ("BI", "BW")]
    again = calls(whole, one(whole, "B PP=1"))
    for name in ("mm", "addmm", "sigmoid"):
        assert sum(part.count(name) for part in found) == again.count(name)
    assert found[1].count("addmm") == 0
    forward = [len(one(dag, "F PP=0 MB=0").outputs) for dag in (split, plain)]
    assert forward[0] < forward[1]


def test_a_recomputed_loss_still_comes_before_its_backward():
    split = dag_of(stages(lambda _: Square()), piper.Recompute({}), HALVES)
    assert split.losses[0] in one(split, "BI PP=1").inputs


class Whole(torch.autograd.Function):
    """A backward of one call, without a mask, for activation and parameter."""

    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, grad):
        low, high = torch.aminmax(grad, dim=0)
        return low.expand_as(grad), high


class Tied(nn.Module):
    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH) if linear else nn.Identity()

    def forward(self, x):
        return self.linear(x).tanh() + Whole.apply(x, self.w)


def test_a_call_that_cannot_be_split_stays_in_bi():
    split = dag_of(stages(lambda s: Tied(linear=s == 1)), HALVES)
    assert calls(split, one(split, "BI PP=1")).count("aminmax") == 1
    assert calls(split, one(split, "BW PP=1")).count("aminmax") == 0
    with pytest.raises(
        DirectiveError, match=r"'B PP=1' cannot be split.*aminmax.*'blocks\.1\.w'.*order its B"
    ):
        dag_of(stages(lambda _: Tied(linear=False)), HALVES)


class Wide(nn.Module):
    """Nine hidden values of which the weights' gradients need one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        h = self.a(x)
        for _ in range(4):
            h = h.sin().tanh()
        return self.b(h)


def test_between_the_halves_only_what_bw_reads_is_kept():
    """All of a stage's BI run before any BW: what only the gradients of activations needed is gone
    by then.
    """
    count = 4
    steps = [(p, m) for p in ("F", "BI", "BW") for m in range(count)]
    head = [*piper.placements.chain([[0], [1]]), piper.Split({}, num_microbatches=count)]
    dag = piper.capture(stages(lambda _: Wide()), mse, vectors(64))
    planned = plan(piper.apply(dag, [*head, order(1, steps)]))
    verify(planned)
    before, between = live_before(planned, 1, "BI"), live_before(planned, 1, "BW")
    needed = {
        value
        for m in range(count)
        for value in one(planned.dag, f"BW PP=1 MB={m}").inputs
        if planned.dag.values[value].role is Role.ACTIVATION
    }
    size = {v: planned.dag.values[v].spec.nbytes(planned.bindings) for v in (*before, *between)}
    sent = {v for c in planned.dag.comms() for v in c.inputs}  # under way to the other stage
    assert between - sent == needed
    # x, the last hidden value and two gradients, instead of nine hidden values.
    assert sum(size[v] for v in between - sent) < sum(size[v] for v in before) / 2


def live_before(planned, device: int, pass_: str) -> set[int]:
    """The activations on *device* before the first chunk of *pass_*."""
    mine = planned.devices[device]
    live: set[int] = set()
    for instruction in mine.instructions:
        node = planned.dag.nodes.get(instruction.node)
        if isinstance(instruction, Compute) and node.pass_.value == pass_:
            break
        live.update(instruction.writes())
        live.difference_update(instruction.frees())
    return {mine.slots[s].value for s in live if mine.slots[s].role is Role.ACTIVATION}
