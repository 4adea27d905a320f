"""What one graph cannot express is refused by name, with the user's line and a remedy."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from tests.capture.reference import Batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from piper.capture import annotate, capture
from piper.capture.joint import check_torch_version
from piper.errors import AnnotationError, CaptureError
from piper.ir.symbols import evaluate

WIDTH = 6


def vectors(rows: int = 4) -> Batch:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


class Model(nn.Module):
    """A linear layer, then whatever the test asks for."""

    def __init__(self, then: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self, self.first(x))


def refused(model: nn.Module, *words: str, loss: Callable[..., object] = F.mse_loss) -> None:
    with pytest.raises(CaptureError) as error:
        capture(model, loss, vectors())
    for word in words:
        assert word in str(error.value)


def takes_item(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return h * h.sum().item()  # the line that is named


def branches(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        return h
    return -h


def selects(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return h[h > 0]


def test_data_dependent_code() -> None:
    refused(Model(takes_item), "test_refusals.py", "h.sum().item()", ".item()", "torch.where")
    refused(Model(branches), "test_refusals.py", "if h.sum() > 0:", "control flow")
    refused(Model(selects), "h[h > 0]", "shape depends on the data", "masks")


def test_higher_order_operators() -> None:
    def condition(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))

    refused(Model(condition), "cond")


def test_error_of_the_model_names_its_line() -> None:
    refused(Model(lambda _m, h: h @ h), "test_refusals.py", "h @ h", "capturing the model failed")


@pytest.mark.parametrize("through", [True, False])
def test_reentrant_checkpoint(through: bool) -> None:
    def then(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
        x = h if through else h.detach()
        return h + checkpoint(model.second, x, use_reentrant=True)

    refused(Model(then), "re-entrant", "use_reentrant=False", "Recompute")
    # The refusal leaves torch as it was.
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=True).sum().backward()
    assert x.grad is not None


def test_parameter_hooks() -> None:
    model = Model(lambda m, h: m.second(h))
    handle = model.second.weight.register_hook(lambda g: g * 2)
    refused(model, "'second.weight'", "gradient hook")
    handle.remove()
    capture(model, F.mse_loss, vectors())
    model.first.bias.register_post_accumulate_grad_hook(lambda _p: None)
    refused(model, "'first.bias'", "gradient hook")


def test_hooks_that_would_vanish() -> None:
    seen: list[torch.Tensor] = []

    def then(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
        h.register_hook(seen.append)
        return model.second(h)

    refused(Model(then), "tensor hook", "returns nothing")
    model = Model(lambda m, h: m.second(h))
    model.second.register_full_backward_hook(lambda _m, _i, _o: None)
    refused(model, "backward hook of module Linear", "returns nothing")
    (hook,) = model.second._backward_hooks.values()
    assert hook.__name__ == "<lambda>", "the model's hooks are as before"
    assert torch.Tensor.register_hook.__module__ == "torch._tensor"


class RandomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:
        return g * torch.rand_like(g)


def test_random_numbers_in_the_backward() -> None:
    refused(Model(lambda _m, h: RandomBackward.apply(h)), "random", "Recompute")


def test_unregistered_parameters() -> None:
    hidden = [nn.Linear(WIDTH, WIDTH)]
    refused(Model(lambda _m, h: hidden[0](h)), "not a registered parameter", "nn.ModuleList")
    scale = nn.Parameter(torch.ones(()))
    refused(
        Model(lambda _m, h: h),
        "not a registered parameter",
        loss=lambda o, y: F.mse_loss(o * scale, y),
    )


def test_state_that_is_not_plain() -> None:
    lazy = nn.Sequential(nn.LazyLinear(WIDTH))
    refused(lazy, "'0.weight'", "not initialised")
    shared = Model(lambda m, h: m.second(h))
    shared.second.weight = nn.Parameter(shared.first.weight.data)
    refused(shared, "'first.weight'", "'second.weight'", "share memory")


def test_writes() -> None:
    def writes_parameter(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.second.weight.mul_(0.5)
        return model.second(h)

    refused(Model(writes_parameter), "writes parameter 'second.weight'")

    counter = torch.zeros(())

    def writes_attribute(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
        counter.add_(h.detach().sum())
        return model.second(h) * counter

    refused(Model(writes_attribute), "register_buffer")

    def grows_buffer(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
        model.cache = torch.cat([model.cache, model.cache])
        return h

    model = Model(grows_buffer)
    model.register_buffer("cache", torch.zeros(2))
    refused(model, "'cache'", "another shape")
    assert model.cache.shape == (2,)


def test_losses() -> None:
    model = Model(lambda _m, h: h)
    refused(model, "must be a scalar", "(s", loss=lambda o, _y: o)
    refused(model, "loss_fn must return", "dict", loss=lambda o, _y: {"loss": o.sum()})
    refused(model, "floating-point", loss=lambda o, _y: o.argmax())
    refused(model, "loss weight must be a scalar", loss=lambda o, y: (o.sum(), y))
    refused(model, "loss weight must be a number", loss=lambda o, _y: (o.sum(), "one"))
    refused(model, "does not depend on any parameter", loss=lambda o, y: F.mse_loss(o.detach(), y))
    refused(model.requires_grad_(False), "does not depend on any parameter")


def test_torch_versions() -> None:
    check_torch_version("2.13.0+cpu")
    with pytest.raises(CaptureError, match=r"2\.13.*found torch 2\.1\.0"):
        check_torch_version("2.1.0")


def test_region_names() -> None:
    def reserved(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with annotate("PASS"):
            return h

    def nested(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with annotate("PP"), annotate("PP"):
            return h * 2

    def mixed(_: nn.Module, h: torch.Tensor) -> torch.Tensor:
        with annotate("PP", 1):
            h = h * 2
        with annotate("PP"):
            return h * 2

    for then, words in ((reserved, "reserved"), (nested, "inside"), (mixed, "both with an index")):
        with pytest.raises(AnnotationError, match=words):
            capture(Model(then), F.mse_loss, vectors())


def test_size_guards() -> None:
    def depends(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
        return model.second(h) if h.shape[0] > 3 else h

    dag = capture(Model(depends), F.mse_loss, vectors(4))
    accepted = [b for b in range(1, 8) if all(evaluate(g, {"B": b}) for g in dag.guards)]
    assert accepted == [4, 5, 6, 7]
    dag = capture(Model(depends), F.mse_loss, vectors(3))
    accepted = [b for b in range(1, 8) if all(evaluate(g, {"B": b}) for g in dag.guards)]
    assert accepted == [2, 3]


def test_specialised_batch_size() -> None:
    dag = capture(Model(lambda _m, h: h + torch.ones(4, 1)), F.mse_loss, vectors(4))
    assert (dag.batch_symbol, dag.captured_size, dag.guards) == (None, 4, ())


def test_fixed_batch_size() -> None:
    dag = capture(Model(lambda _m, h: h), F.mse_loss, vectors(8), batch_size=2)
    assert (dag.batch_symbol, dag.captured_size, dag.batch_size, dag.guards) == (None, 2, 8, ())
    assert dag.batch[0].spec.shape == (2, WIDTH)
    assert capture(Model(lambda _m, h: h), F.mse_loss, vectors(8), batch_size=1).captured_size == 1


def test_example_of_one_row_is_captured_symbolically() -> None:
    dag = capture(Model(lambda _m, h: h), F.mse_loss, vectors(1))
    assert (dag.batch_symbol, dag.batch_size) == ("B", 1)
