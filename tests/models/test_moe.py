"""The mixture-of-experts model and its parts, eager; how it trains under strategies:
tests/equality/test_experts.py.
"""

import pytest
import torch
from torch.nn import functional

from piper.errors import ConfigError
from piper.models import MoE, MoEConfig, moe_loss
from piper.models.moe import Mixture, rotated
from piper.models.routing import sort_by_expert
from piper.runtime.grouped import grouped_mm, grouped_outer


def mixture(**changes) -> Mixture:
    torch.manual_seed(0)
    settings = {"width": 8, "num_heads": 2, "num_experts": 4, "expert_width": 6, **changes}
    return Mixture(MoEConfig(**settings), 0).double()


def tokens(rows: int = 3, length: int = 5, width: int = 8) -> torch.Tensor:
    make = torch.Generator().manual_seed(1)
    return torch.randn(rows, length, width, generator=make, dtype=torch.float64)


def by_loop(model: Mixture, x: torch.Tensor, room: int | None = None) -> torch.Tensor:
    """Token by token, choice by choice; an expert takes the first *room* that come."""
    taken = [0] * model.config.num_experts
    rows = []
    for token in x.flatten(0, 1):
        probabilities = model.router(token).softmax(-1)
        weights, chosen = probabilities.topk(model.config.experts_per_token)
        weights = weights / weights.sum()
        row = torch.zeros_like(token)
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            taken[expert] += 1
            if room is not None and taken[expert] > room:
                continue
            gate, up = (token @ model.experts.up[expert]).chunk(2)
            row = row + weight * ((functional.silu(gate) * up) @ model.experts.down[expert])
        rows.append(row if model.shared is None else row + model.shared(token))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        ({}, None),
        ({"shared_width": 3, "experts_per_token": 3}, None),
        ({"capacity_factor": 4.0}, None),
        ({"capacity_factor": 1.0}, 8),
        ({"capacity_factor": 0.5, "shared_width": 3}, 4),
    ],
)
def test_a_mixture_is_what_its_loop_says(changes, room):
    """15 tokens, 2 choices each, 4 experts: 7.5 choices per expert times the capacity factor,
    rounded up.
    """
    model, x = mixture(**changes), tokens()
    out, _ = model(x)
    torch.testing.assert_close(out, by_loop(model, x, room), rtol=1e-12, atol=1e-12)


def test_the_balance_loss_is_least_where_experts_are_used_evenly():
    model = mixture(balance_weight=1.0, z_weight=0.0, experts_per_token=1)
    even = torch.eye(4, 8, dtype=torch.float64).repeat(3, 1)[None]
    with torch.no_grad():
        model.router.weight.copy_(10 * torch.eye(4, 8))
        assert model(even)[1] == pytest.approx(1.0)
        assert model(even[:, :1].repeat(1, 12, 1))[1] == pytest.approx(4.0, rel=1e-3)


def test_the_z_loss_is_the_mean_squared_log_partition():
    model, x = mixture(balance_weight=0.0, z_weight=2.0), tokens()
    logits = model.router(x.flatten(0, 1))
    wanted = 2.0 * logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(model(x)[1], wanted)


def test_tokens_are_counted_in_training_only():
    model, x = mixture(count_tokens=True), tokens()
    model.eval()(x)
    assert model.expert_tokens.sum() == 0
    model.train()(x)
    assert model.expert_tokens.sum() == 15 * 2
    assert "expert_tokens" in model.state_dict()
    assert "expert_tokens" not in mixture().state_dict()


def test_the_model_returns_logits_and_one_auxiliary_loss():
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "width": 8, "num_heads": 2, "num_layers": 3}
    model = MoE(MoEConfig(**sizes, dense_layers=1, dense_width=12, num_stages=2)).double()
    ids = torch.arange(12).view(2, 6) % 11
    logits, auxiliary = model(ids)
    assert logits.shape == (2, 6, 11)
    assert auxiliary.shape == ()
    wanted = functional.cross_entropy(logits.flatten(0, 1), ids.flatten()) + auxiliary
    assert moe_loss((logits, auxiliary), ids) == wanted
    changed = ids.clone()
    changed[:, -1] = 3
    torch.testing.assert_close(model(changed)[0][:, :-1], logits[:, :-1])  # causal


def test_rotation_depends_on_the_distance_alone():
    q, k = tokens(1, 1, 8)[None], tokens(1, 2, 8)[None, :, 1:]
    score = lambda at, to: (  # noqa: E731
        rotated(q.expand(1, 1, 9, 8))[0, 0, at] @ rotated(k.expand(1, 1, 9, 8))[0, 0, to]
    )
    torch.testing.assert_close(score(1, 4), score(4, 7))
    assert not torch.isclose(score(1, 4), score(1, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected an integer >= 1, found 0"),
        ({"experts_per_token": 9}, "at most num_experts=8, found 9"),
        ({"width": 12, "num_heads": 4}, r"a multiple of 2\*num_heads=8, found 12"),
        ({"capacity_factor": 0.0}, "a positive number or None, found 0.0"),
    ],
)
def test_impossible_sizes(changes, message):
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**changes)


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [0, 5, 0], [1, 1, 1]])
def test_grouped_products(counts):
    """The rows behind the last group's give zeros and get no gradient."""
    make = torch.Generator().manual_seed(0)
    rows, weights = (
        torch.randn(*shape, generator=make, dtype=torch.float64, requires_grad=True)
        for shape in ((6, 4), (3, 4, 2))
    )
    number = torch.tensor(counts)
    groups = rows[: sum(counts)].split(counts)
    by_group = [part @ w for part, w in zip(groups, weights, strict=True)]
    wanted = torch.cat([*by_group, rows.new_zeros(6 - sum(counts), 2)])
    torch.testing.assert_close(grouped_mm(rows, weights, number), wanted)
    outer = torch.stack([part.t() @ part for part in groups])
    torch.testing.assert_close(grouped_outer(rows, rows, number), outer)
    assert torch.autograd.gradcheck(grouped_mm, (rows, weights, number))
    other = (rows * 2).detach().requires_grad_()
    assert torch.autograd.gradcheck(grouped_outer, (rows, other, number))
    assert torch.autograd.gradgradcheck(grouped_mm, (rows, weights, number))


def test_sorting_keeps_the_order_of_tokens():
    x = torch.arange(4.0)[:, None]
    routed = sort_by_expert(x, torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]]), 3)
    assert routed.rows.flatten().tolist() == [0, 1, 3, 1, 2, 0, 2, 3]
    assert routed.counts.tolist() == [3, 2, 3]
    assert routed.unsort(routed.rows).flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
