"""What is derived for mixed precision."""

from functools import cache

import pytest
import torch
from torch import nn

import piper
from piper.capture import capture
from piper.dtypes import DType
from piper.ir.dag import Clip, GradientUse, Role
from piper.ir.edit import use_gradients
from piper.ops.all_gather import AllGather, Refresh
from piper.ops.grad_norm import Norm
from piper.ops.product import Product
from piper.ops.round_masters import RoundMasters
from piper.ops.update import Update


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        with piper.annotate("PP", 0):
            x = self.first(x)
        with piper.annotate("PP", 1):
            return self.second(x)


def weighted(outputs, targets):
    return ((outputs - targets) ** 2).sum(), torch.tensor(len(targets))


@cache
def captured(loss):
    return capture(Model(), loss, (torch.randn(8, 4), torch.randn(8, 2)), precision="bf16")


def derived(groups, loss=nn.functional.mse_loss, *, scaled=False, **options):
    dag = captured(loss)
    if scaled:
        clip = Clip(Norm.L2, None)
        dag = use_gradients(dag, GradientUse.UPDATE, clip, loss_scaled=True).dag
    places = [piper.Place({"PP": i}, devices=g) for i, g in enumerate(groups)]
    return piper.apply(dag, [*places, piper.Replicate({}, **options)])


def nodes(dag, kind):
    return [n for n in dag.nodes.values() if isinstance(n.work, kind)]


@pytest.mark.parametrize("options", [{}, {"shard_params": True}])
def test_alone_a_master_copy_is_whole(options):
    """Also where there is nobody to share with: it is rounded into what chunks read, not
    gathered.
    """
    dag = derived([[0], [1]], **options)
    assert dag.shards == {
        "first.weight": ((0,),),
        "first.bias": ((0,),),
        "second.weight": ((1,),),
    }
    shards = {v.name: v.spec for v in dag.values.values() if v.role is Role.SHARD}
    for name, spec in shards.items():
        assert spec.shape == dag.parameters[name].spec.shape
        assert spec.dtype is DType.FLOAT32
    assert [n.work.names for n in nodes(dag, RoundMasters)] == [
        n.work.parameters for n in nodes(dag, Update)
    ]
    assert not nodes(dag, AllGather)
    assert not nodes(dag, Refresh)


def test_replicas_each_have_one():
    dag = derived([[0, 1], [2, 3]])
    assert dag.shards["first.weight"] == ((0,), (1,))
    assert {n.devices for n in nodes(dag, RoundMasters)} == {(0, 1), (2, 3)}


def test_slices_are_gathered_in_the_compute_type():
    dag = derived([[0, 1], [2, 3]], shard_params=True)
    assert dag.shards["first.weight"] == ((0, 1),)
    assert not nodes(dag, RoundMasters)
    for node in nodes(dag, AllGather):
        made = {dag.values[v].spec.dtype for v in node.outputs}
        assert made == {DType.BFLOAT16}
    trained = [v for v in dag.values.values() if v.role is Role.SHARD and v.name != "second.bias"]
    assert {v.spec.dtype for v in trained} == {DType.FLOAT32}
    (frozen,) = (v for v in dag.values.values() if v.role is Role.SHARD and v.name == "second.bias")
    assert frozen.spec.dtype is DType.BFLOAT16


def test_buckets_are_measured_in_the_type_that_is_reduced():
    """first.weight and first.bias are 30 elements: 120 bytes of float32, though 60 of bfloat16."""
    whole = nodes(derived([[0, 1], [2, 3]], bucket_size=121 / 2**20), Update)
    cut = nodes(derived([[0, 1], [2, 3]], bucket_size=119 / 2**20), Update)
    assert ("first.weight", "first.bias") in {
        tuple(sorted(n.work.parameters, reverse=True)) for n in whole
    }
    assert all(len(n.work.parameters) == 1 for n in cut)


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, weighted])
def test_every_update_divides_by_the_scale_and_waits_for_the_norm(loss):
    dag = derived([[0, 1], [2, 3]], loss, scaled=True)
    for update in nodes(dag, Update):
        assert update.work.scaled
        assert update.work.only_finite
        assert update.work.max_norm is None
        assert update.work.normed
        assert Role.NORM in {dag.values[v].role for v in update.inputs}
    products = nodes(dag, Product)
    assert len(products) == (2 if loss is weighted else 0)
    (scale,) = (v for v in dag.values.values() if v.role is Role.SCALE)
    readers = set(dag.consumers[scale.id])
    assert readers >= {n.id for n in products or nodes(dag, Update)}


def test_the_norm_must_be_asked_for():
    with pytest.raises(AssertionError, match="norm"):
        use_gradients(captured(weighted), GradientUse.UPDATE, None, loss_scaled=True)
