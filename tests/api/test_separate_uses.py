import torch
from torch import nn

from piper.api.separate_uses import SeparateUses


def stand_in(tensor):
    wide = tensor.detach().clone().requires_grad_()
    return wide.detach().bfloat16().requires_grad_(), wide


def gradient_of(forward, weight, **options):
    short, wide = stand_in(weight)
    with SeparateUses([(short, wide)]):
        loss = forward(short)
    return torch.autograd.grad(loss, [short, wide], allow_unused=True, **options)


def test_gradients_of_two_uses_are_added_in_the_wide_type():
    torch.manual_seed(0)
    weight, a, b = torch.randn(64), torch.randn(64).bfloat16(), torch.randn(64).bfloat16()

    def forward(w):
        return (w * a).float().sum() + (w * b).float().sum()

    short, wide = gradient_of(forward, weight)
    assert short is None
    assert torch.equal(wide, a.float() + b.float())
    assert not torch.equal(wide, (a + b).float())


def test_uses_in_lists_and_keywords_are_seen():
    weight = torch.randn(3)

    def forward(w):
        stacked = torch.stack([w, w]).float().sum()
        return (
            stacked
            + nn.functional.linear(input=w.new_ones(1, 3), weight=w.view(1, 3)).float().sum()
        )

    short, wide = gradient_of(forward, weight)
    assert short is None
    assert torch.equal(wide, torch.full((3,), 3.0))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_what_no_torch_function_sees_reaches_the_stand_in():
    short, wide = gradient_of(
        lambda w: Double.apply(w).float().sum() + w.sum().float(), torch.randn(3)
    )
    assert torch.equal(short, torch.full((3,), 2.0).bfloat16())
    assert torch.equal(wide, torch.ones(3))


def test_questions_are_answered_by_the_stand_in():
    short, wide = stand_in(torch.randn(3))
    with SeparateUses([(short, wide)]):
        assert short.dtype == torch.bfloat16
        assert short.is_leaf
        assert short.requires_grad
