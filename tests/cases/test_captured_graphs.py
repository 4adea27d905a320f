"""What is captured is what PyTorch computes, wherever and however it is called, or is refused by
name.
"""

import copy
import threading

import pytest
import torch
from tests.cases.equal import assert_equal, randn, sgd
from torch import nn
from torch.nn import functional

import piper
from piper.errors import CaptureError, FilterError, PiperWarning

PIPELINE = piper.strategies.pipeline("1f1b", [[0], [1]], 2)
BATCH = (randn(8, 8), randn(8, 8, seed=1))
SINGLE = tuple(t.float() for t in BATCH)


class Two(nn.Module):
    """Two stages, the second of which is a function of the model and its input."""

    def __init__(self, second, **buffers):
        super().__init__()
        self.a, self.b, self.second = nn.Linear(8, 8), nn.Linear(8, 8), second
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            return self.second(self, h)


def plain(model, h):
    return model.b(h)


def trained(model, batch=SINGLE, strategy=PIPELINE, loss=functional.mse_loss, **options):
    """The state after a step."""
    arguments = {"optimizer": sgd, "backend": "inprocess", **options}
    with piper.compile(model, loss, strategy, batch, **arguments) as trainer:
        trainer.step(*batch)
        return trainer.state_dict()


def in_pytorch(model, batch=SINGLE, microbatches=2):
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    for x, y in zip(*(t.chunk(microbatches) for t in batch), strict=True):
        (functional.mse_loss(model(x), y) / microbatches).backward()
    optimizer.step()
    return model.state_dict()


def assert_close(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


# --- buffers that are written, and whose old value nothing reads ----------------------------------


def out_of_mean(model, h):
    torch.mean(h.detach(), 0, out=model.stat)
    return model.b(h)


def out_twice(model, h):
    torch.add(h.detach().sum(0), 1, out=model.stat)
    torch.mul(model.stat, 2, out=model.stat)
    return model.b(h)


def zeroed(model, h):
    model.stat.zero_()
    model.stat.index_add_(0, torch.tensor([1, 2]), h.detach().sum(0)[:2])
    return model.b(h)


def filled(model, h):
    model.stat.fill_(3)
    return model.b(h)


def replaced(model, h):
    model.stat = h.detach().mean(0)
    return model.b(h)


@pytest.mark.parametrize("write", [out_of_mean, out_twice, zeroed, filled, replaced])
def test_a_buffer_that_is_written_and_not_read(write):
    assert_equal(Two(write, stat=torch.zeros(8)), functional.mse_loss, PIPELINE, BATCH)


def test_such_a_buffer_is_averaged_over_replicas():
    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, replicated_buffers="mean")
    model = Two(lambda m, h: (m.stat.copy_(h.detach().mean(0)), m.b(h))[1], stat=torch.zeros(8))
    state = trained(model, strategy=strategy)
    x = SINGLE[0]
    with torch.no_grad():  # the last microbatches of both replicas
        expected = torch.cat([model.a(x[2:4]), model.a(x[6:8])]).mean(0)
    assert_close(state, {"stat": expected})


def test_truth_values_in_a_buffer():
    def seen(model, h):
        torch.any(h.detach() > 1, 0, out=model.stat)
        return model.b(h)

    assert_equal(
        Two(seen, stat=torch.zeros(8, dtype=torch.bool)), functional.mse_loss, PIPELINE, BATCH
    )


# --- operators with optional results --------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.r = kind(8, 8, batch_first=True, **options)
        self.b = nn.Linear(16 if options.get("bidirectional") else 8, 8)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.r(x)[0]
        with piper.annotate("PP", 1):
            return self.b(h)


SEQUENCES = (randn(8, 3, 8), randn(8, 3, 8, seed=1))
TWO_LAYERS = {"num_layers": 2, "bidirectional": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        pytest.param(nn.LSTM, TWO_LAYERS, marks=pytest.mark.full),
        pytest.param(nn.GRU, {}, marks=pytest.mark.full),
        pytest.param(nn.RNN, {"nonlinearity": "relu"}, marks=pytest.mark.full),
    ],
)
def test_recurrent_layers_in_float32(kind, options):
    """oneDNN's LSTM returns a workspace only while gradients are recorded."""
    model, batch = Recurrent(kind, **options), tuple(t.float() for t in SEQUENCES)
    assert_close(trained(model, batch), in_pytorch(model, batch))


@pytest.mark.full
def test_a_recurrent_layer_in_bfloat16():
    model, batch = Recurrent(nn.LSTM), tuple(t.float() for t in SEQUENCES)
    found, expected = trained(model, batch, precision="bf16"), in_pytorch(model, batch)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-2)


# --- what is refused, and why ---------------------------------------------------------------------


def inverted(model, h):
    return model.b(h @ torch.linalg.inv(h.t() @ h + torch.eye(8)))


def factored(model, h):
    return model.b(h @ torch.linalg.cholesky(h.t() @ h + torch.eye(8)))


@pytest.mark.parametrize(
    ("function", "name"), [(inverted, "torch.linalg.inv"), (factored, "torch.linalg.cholesky")]
)
def test_operators_that_check_for_errors_name_the_line_and_what_to_call(function, name):
    with pytest.raises(CaptureError, match=rf"test_captured_graphs\.py:\d+ .*{name}_ex"):
        trained(Two(function))


def test_without_the_check_it_is_equal():
    def inverse(model, h):
        eye = torch.eye(8, dtype=h.dtype)
        return model.b(h @ torch.linalg.inv_ex(h.t() @ h + eye)[0])

    assert_equal(Two(inverse), functional.mse_loss, PIPELINE, BATCH)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kind, verify):
    model = nn.Sequential(kind(10, 8, sparse=True), nn.Linear(8, 8))
    shape = (8,) if kind is nn.Embedding else (8, 3)
    batch = torch.zeros(shape, dtype=torch.long), SINGLE[1]
    with pytest.raises(CaptureError, match=r"'0\.weight' is sparse.*sparse=False"):
        trained(model, batch, [piper.Place({}, [0])], verify_capture=verify)


class Wrapper(nn.DataParallel):
    pass


@pytest.mark.parametrize(
    ("wrap", "remedy"),
    [
        (nn.DataParallel, r"model\.module"),
        (Wrapper, r"model\.module"),
        (torch.compile, r"model\._orig_mod"),
        (lambda m: nn.Sequential(torch.compile(m)), r"0\._orig_mod"),
        (lambda _: torch.jit.script(nn.Linear(8, 8)), "scripted"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_models(wrap, remedy):
    with pytest.raises(CaptureError, match=remedy):
        trained(wrap(Two(plain)))


# --- where it is called ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_around_the_call_change_nothing(mode):
    model = Two(plain)
    with mode():
        found = trained(model)
        piper.check(model, functional.mse_loss, PIPELINE, SINGLE, optimizer=sgd).require()
    assert_close(found, in_pytorch(model))


def test_autocast_around_the_call_is_ignored_with_a_warning():
    model = Two(plain)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(PiperWarning, match="precision="):
        found = trained(model)
    assert_close(found, in_pytorch(model))


def test_several_threads_compile_at_once():
    before = torch.Tensor.register_hook
    models = [Two(plain) for _ in range(3)]
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: trained(models[i])})) for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, model in enumerate(models):
        assert_close(found[i], in_pytorch(model))
    assert torch.Tensor.register_hook is before


# --- regions of training only ---------------------------------------------------------------------


class Heads(nn.Module):
    """A further head while training."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.a(x)
        if self.training:
            with piper.annotate("HEAD", 0):
                extra = self.c(h)
        with piper.annotate("PP", 1):
            return self.b(h) + extra if self.training else self.b(h)


@pytest.mark.parametrize("devices", [(0, 1, 2), (1, 2, 0)])
def test_a_region_that_evaluation_does_not_have(devices):
    stages = [{"PP": 0}, {"PP": 1}, {"HEAD": 0}]
    strategy = [
        *(piper.Place(f, [d]) for f, d in zip(stages, devices, strict=True)),
        piper.Recompute({"HEAD": 0}),
        piper.Split({}, num_microbatches=2),
    ]
    model, (x, y) = Heads(), SINGLE
    with piper.compile(
        model, functional.mse_loss, strategy, (x, y), optimizer=sgd, backend="inprocess"
    ) as trainer:
        found = trainer.evaluate(x, y).loss
    expected = functional.mse_loss(model.eval()(x), y).item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_region_that_neither_has_is_refused():
    with pytest.raises(FilterError, match="PP=7"):
        trained(Heads(), strategy=[piper.Place({"PP": 7}, [0])])


# --- weights of a loss ----------------------------------------------------------------------------

NARROW = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kind", NARROW)
def test_weights_in_a_narrow_type_are_added_up_exactly(kind):
    """Sums of truth values are counts; 8 x 40 is more than eight bits hold."""

    def loss(outputs, targets):
        weight = torch.tensor(True) if kind is torch.bool else torch.tensor(100)
        return (outputs - targets).square().sum(), weight.to(kind)

    strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=2)
    assert_equal(Two(plain), loss, strategy, BATCH)
