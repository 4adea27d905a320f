"""What tracing would freeze: each is equal to plain PyTorch, or an error (of what matters only later,
a warning) that names it and its line.
"""

import itertools
import random
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.cases.equal import mse, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

import piper
from piper.errors import CaptureError, PiperWarning

F = nn.functional
full = pytest.mark.full
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], 2)
BATCH = randn(8, 8), randn(8, 8, seed=1)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("stat", torch.zeros(8))
        self.register_buffer("other", torch.ones(8))
        self.double()

    def last(self, h):
        return self.b(h)

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            return self.last(h)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def compiled(model, loss_fn=mse, strategy=STRATEGY, **options):
    return piper.compile(
        model, loss_fn, strategy, BATCH, optimizer=sgd, backend="inprocess", **options
    )


def refused(model, loss_fn=mse, **options):
    with pytest.raises(CaptureError) as raised:
        compiled(model, loss_fn, **options)
    return str(raised.value)


class Skips(Two):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def last(self, h):
        if self.training and random.random() < self.p:  # drawn here
            return h
        return h + self.b(h)


@pytest.mark.parametrize("p", [1e-6, 0.2, 0.98])
def test_random_numbers_of_python(p):
    text = refused(Skips(p))
    assert "# drawn here" in text
    assert "random (Python's)" in text


def test_a_layer_that_capture_skips_is_no_wrong_filter():
    random.seed(1)  # the first number is 0.13
    text = refused(Skips(0.9), verify_capture=False)
    assert "# drawn here" in text
    assert "filter" not in text


class Drawing(Two):
    def __init__(self, generator):
        super().__init__()
        self.rng = generator

    def last(self, h):
        return self.b(h) if self.rng.random() < 0.999 else h  # drawn here


@pytest.mark.parametrize(
    "generator",
    [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)],
    ids=lambda generator: type(generator).__name__,
)
def test_generators_that_the_model_holds(generator):
    model = Drawing(generator)
    state = repr(generator.__reduce__())
    text = refused(model)
    assert "# drawn here" in text
    assert "from rng" in text
    assert model.rng is generator
    assert repr(generator.__reduce__()) == state


class NumpyNoise(Two):
    def last(self, h):
        return self.b(h) * (1 + 1e-3 * np.random.rand())  # noqa: NPY002  drawn here


def test_random_numbers_of_numpy():
    text = refused(NumpyNoise())
    assert "drawn here" in text
    assert "numpy.random" in text


class Clocked(Two):
    def last(self, h):
        return self.b(h) * (1 + time.perf_counter() % 1)


def test_what_depends_on_the_time():
    assert "not reproducible" in refused(Clocked())


def count_attribute(model):
    model.n += 1  # changed here
    return model.n


def count_list(model):
    model.n.append(1)  # changed here
    return len(model.n)


def count_nested(model):
    model.n.inner["x"] += 1  # changed here
    return model.n.inner["x"]


def count_class(model):
    type(model).shared += 1  # changed here
    return type(model).shared


TOTAL = 0


def count_global(model):
    global TOTAL  # noqa: PLW0603
    TOTAL += 1  # changed here
    return TOTAL


COUNTERS = {
    "attribute": (count_attribute, 0, "changes n "),
    "list": (count_list, [], "changes n "),
    "nested": (count_nested, SimpleNamespace(inner={"x": 0}), "changes n "),
    "class": (count_class, None, "Counting.shared (0"),
    "global": (count_global, None, "TOTAL (global of"),
}


class Counting(Two):
    shared = 0

    def __init__(self, count, n, threshold=0):
        super().__init__()
        self.count, self.n, self.threshold = count, n, threshold

    def last(self, h):
        return self.b(h) * max(1, self.count(self) - self.threshold)


@pytest.mark.parametrize("name", COUNTERS)
def test_state_that_the_next_call_depends_on(name):
    count, start, words = COUNTERS[name]
    text = refused(Counting(count, start))
    assert words in text
    assert "# changed here" in text
    assert Counting.shared == 0
    assert TOTAL == 0


@pytest.mark.parametrize(
    "name", [n if n == "attribute" else pytest.param(n, marks=full) for n in COUNTERS]
)
def test_state_that_a_later_call_may_depend_on_is_warned_of(name):
    count, start, words = COUNTERS[name]
    with (
        pytest.warns(PiperWarning, match="in every call") as found,
        compiled(Counting(count, start, threshold=9)),
    ):
        pass
    assert len(found) == 1
    assert words in str(found[0].message)
    assert found[0].filename == __file__


def test_state_of_the_loss_function():
    calls = [0]

    def loss_fn(outputs, targets):
        calls[0] += 1  # changed here
        return mse(outputs, targets) * calls[0]

    text = refused(Two(), loss_fn)
    assert "calls (closure of" in text
    assert "# changed here" in text
    assert calls == [0]


class Iterating(Two):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)

    def last(self, h):
        return self.b(h) * next(self.numbers)


def test_an_iterator_that_the_model_holds():
    assert "not reproducible" in refused(Iterating())


class Remembers(Two):
    memory = None

    def last(self, h):
        before, self.memory = self.memory, h.detach()  # kept here
        return self.b(h if before is None else h + before)


def test_a_tensor_kept_in_an_attribute():
    model = Remembers()
    text = refused(model)
    assert "changes memory" in text
    assert "# kept here" in text
    assert "register_buffer" in text
    assert "memory" not in vars(model)


class Caches(Two):
    table = None

    def last(self, h):
        if self.table is None:
            self.table = torch.arange(8.0, dtype=h.dtype)
        self.last_norm = h.detach().norm()  # for a log
        return self.b(h) + self.table


def test_a_cache_and_a_value_for_a_log_are_no_matter():
    model = Caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PiperWarning)
        assert piper.check(model, mse, STRATEGY, BATCH, optimizer=sgd).ok
    assert "last_norm" not in vars(model)


class Writing(Two):
    def __init__(self, write):
        super().__init__()
        self.write = write

    def last(self, h):
        self.write(self, h.detach().mean(0))
        return self.b(h) + self.stat


def by_copy(model, new):
    model.stat.copy_(0.9 * model.stat + new)


def by_assignment(model, new):
    model.stat = 0.9 * model.stat + new


def by_setattr(model, new):
    setattr(model, "stat", new)  # noqa: B010


def by_registering(model, new):
    model.register_buffer("stat", new)


def by_data_copy(model, new):
    model.stat.data.copy_(new)


def by_data(model, new):
    model.stat.data = new  # written here


def by_swap(model, new):
    torch.utils.swap_tensors(model.stat, new.clone())  # written here


def by_set(model, new):
    model.stat.set_(new)


def by_numpy(model, new):
    model.stat.numpy()[:] = new.numpy()


@pytest.mark.parametrize(
    "write", [by_copy, by_assignment, by_setattr, by_registering, by_data_copy]
)
def test_buffers_that_are_written_equal_plain_pytorch(write):
    model, plain = Writing(write), Writing(write)
    with compiled(model) as trainer:
        trainer.step(*BATCH)
        found = trainer.state_dict()["stat"]
    for rows in BATCH[0].split(4):
        plain(rows)
    assert torch.allclose(found, plain.stat, rtol=1e-12)
    assert torch.equal(model.stat, torch.zeros(8, dtype=torch.float64))


@full
@pytest.mark.parametrize("write", [by_data, by_swap])
def test_buffers_that_are_written_past_tracing(write):
    text = refused(Writing(write))
    assert "buffer 'stat'" in text or "the captured graph does not compute" in text


@pytest.mark.parametrize("write", [by_data, pytest.param(by_swap, marks=full)])
def test_buffers_that_are_written_past_tracing_and_not_read(write):
    class Silent(Writing):
        def last(self, h):
            self.write(self, h.detach().mean(0))
            return self.b(h)

    text = refused(Silent(write))
    assert "writes buffer 'stat'" in text
    assert "# written here" in text


@full
@pytest.mark.parametrize("write", [by_set, by_numpy])
def test_buffers_whose_memory_is_replaced_are_refused(write):
    assert refused(Writing(write))


class WritesParameter(Two):
    def last(self, h):
        self.b.weight.data = self.b.weight.data.clamp(-0.1, 0.1)  # written here
        return self.b(h)


def test_a_parameter_that_the_forward_writes():
    model = WritesParameter()
    before = model.b.weight.detach().clone()
    text = refused(model)
    assert "writes parameter 'b.weight'" in text
    assert "# written here" in text
    assert torch.equal(model.b.weight, before)


class Checkpointed(Two):
    def last(self, h):
        return checkpoint(lambda h: self.b(F.dropout(h, 0.5)), h, use_reentrant=False)


def test_dropout_inside_a_checkpoint_is_equal():
    assert piper.check(Checkpointed(), mse, STRATEGY, BATCH, optimizer=sgd, steps=3).ok


class TwoWorlds(Two):
    def last(self, h):
        return self.b(h) * (2 if torch.compiler.is_compiling() else 1)


def test_a_wrong_graph_is_refused_where_it_parts():
    text = refused(TwoWorlds())
    assert "part at aten.mul.Tensor in region {'PP': 1}" in text
    assert "random" not in text
    assert "counter" not in text


def test_the_model_and_the_random_states_are_left_as_they_were():
    model = Counting(count_list, [], threshold=9)
    model.a.weight.grad = torch.ones(8, 8, dtype=torch.float64)
    hook = model.register_forward_hook(lambda *_: None)
    tensors = {n: t.clone() for n, t in model.state_dict().items()}
    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    names = set(vars(model))
    with pytest.warns(PiperWarning), compiled(model):
        pass
    assert set(vars(model)) == names
    assert model.n == []
    assert model.training
    assert hook.id in model._forward_hooks
    assert all(torch.equal(t, tensors[n]) for n, t in model.state_dict().items())
    assert torch.equal(model.a.weight.grad, torch.ones(8, 8, dtype=torch.float64))
    assert model.b.weight.grad is None
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


class Counter:
    """An object of the user's own."""

    def __init__(self):
        self.calls = 0


def test_an_object_that_a_function_of_the_model_refers_to():
    counter = Counter()

    class Counting(Two):
        def last(self, h):
            counter.calls += 1
            return self.b(h) * (2 if counter.calls > 3 else 1)

    with (
        pytest.warns(PiperWarning, match="the forward changes counter"),
        compiled(Counting()),
    ):
        pass
