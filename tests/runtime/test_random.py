"""Random numbers are a function of (seed, step, microbatch, ordinal) alone."""

import threading

import pytest
import torch
from torch.nn import functional

from piper.errors import CaptureError
from piper.ops.base import RandomKey
from piper.runtime.random import DrawFrom, draw, generator_for, is_random, stream_seed

CPU = torch.device("cpu")
aten = torch.ops.aten


def test_seeds_differ_in_every_word_and_in_their_low_half():
    names = {
        (s, t, m, o) for s in range(4) for t in range(20) for m in range(20) for o in range(20)
    }
    seeds = [stream_seed(*name) for name in names]
    assert len(set(seeds)) == len(seeds)
    # 32000 draws from 2**32: more than a few collisions would be a bad mix
    assert len({seed & 0xFFFF_FFFF for seed in seeds}) > len(seeds) - 5


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, 2**70 + 3])
def test_any_integer_is_a_seed(seed):
    generator = generator_for(RandomKey(seed, 0, 0, (0,)), 0, CPU)
    assert torch.rand(2, generator=generator).shape == (2,)


def test_threads_draw_the_same():
    key = RandomKey(3, 1, 4, (1, 5, 9))
    drawn: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        for _ in range(50):
            drawn[number] = torch.cat(
                [torch.rand(100, generator=generator_for(key, slot, CPU)) for slot in range(3)]
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(drawn[i], drawn[0]) for i in range(4))


OPERATORS = [
    (aten.bernoulli.p, (torch.zeros(50), 0.3), {}),
    (aten.bernoulli.default, (torch.full((50,), 0.3),), {}),
    (aten.rand.default, ([50],), {}),
    (aten.randn.default, ([50],), {"dtype": torch.float64}),
    (aten.randint.default, (9, [50]), {}),
    (aten.randint.low, (3, 9, [50]), {}),
    (aten.randperm.default, (50,), {}),
    (aten.rand_like.default, (torch.zeros(50),), {}),
    (aten.randn_like.default, (torch.zeros(50),), {}),
    (aten.randint_like.low_dtype, (torch.zeros(50), 2, 9), {}),
    (aten.multinomial.default, (torch.ones(50), 20), {}),
    (aten.poisson.default, (torch.full((50,), 4.0),), {}),
    (aten.poisson.default, (torch.full((50,), 4.0), None), {}),
    (aten.normal_functional.default, (torch.zeros(50),), {}),
    (aten.uniform.default, (torch.zeros(50),), {}),
    (
        aten.rrelu_with_noise_functional.default,
        (-torch.ones(50), torch.zeros(50), 0.1, 0.3, True),
        {},
    ),
]


def first(result: object) -> torch.Tensor:
    found = result[0] if isinstance(result, tuple) else result
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(("overload", "args", "kwargs"), OPERATORS, ids=str)
def test_operators_draw_from_the_given_generator_and_no_other(overload, args, kwargs):
    assert is_random(overload)
    state = torch.get_rng_state()
    results = []
    for seed in (7, 7, 8):
        generator = torch.Generator().manual_seed(seed)
        results.append(first(draw(overload)(generator, *args, **kwargs)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_native_dropout_is_dropout():
    x = torch.randn(10_000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    value, mask = draw(aten.native_dropout.default)(generator, x, 0.25, True)
    assert mask.dtype == torch.bool
    assert torch.equal(value, x * mask * (1 / 0.75))
    assert 0.73 < mask.double().mean().item() < 0.77
    for p, train in [(0.0, True), (0.25, False)]:
        value, mask = draw(aten.native_dropout.default)(generator, x, p, train)
        assert torch.equal(value, x)
        assert mask.all()
    value, mask = draw(aten.native_dropout.default)(generator, x, 1.0, True)
    assert not value.any()
    assert not mask.any()


def test_an_operator_without_a_generator_is_refused_by_name():
    lib = torch.library.Library("piper_test_random", "FRAGMENT")
    lib.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    with pytest.raises(CaptureError, match=r"piper_test_random.noise"):
        draw(torch.ops.piper_test_random.noise.default)


def test_eager_draws_by_call_order():
    def work() -> list[torch.Tensor]:
        return [
            functional.dropout(torch.ones(50), 0.5),
            torch.empty(50).uniform_(),
            torch.rand(50),
            torch.empty(50).normal_(),
        ]

    with DrawFrom(seed=1, step=2, microbatch=3):
        found = work()
    key = RandomKey(1, 2, 3, (0, 1, 2, 3))
    assert torch.equal(
        found[0], torch.empty(50).bernoulli_(0.5, generator=generator_for(key, 0, CPU)) / 0.5
    )
    assert torch.equal(found[1], torch.empty(50).uniform_(generator=generator_for(key, 1, CPU)))
    assert torch.equal(found[2], torch.rand(50, generator=generator_for(key, 2, CPU)))
    assert torch.equal(found[3], torch.empty(50).normal_(generator=generator_for(key, 3, CPU)))
    with DrawFrom(seed=1, step=2, microbatch=3):
        again = work()
    with DrawFrom(seed=1, step=2, microbatch=4):
        other = work()
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found, other, strict=True))


def test_eager_training_under_drawn_numbers_keeps_its_gradients():
    x = torch.randn(20, dtype=torch.float64, requires_grad=True)
    with DrawFrom(0, 0, 0):
        y = functional.dropout(x, 0.5)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.where(y != 0, 2.0, 0.0).to(torch.float64))


def test_in_place_dropout():
    with DrawFrom(0, 0, 0):
        expected = functional.dropout(torch.ones(50), 0.5)
    x = torch.ones(50)
    with DrawFrom(0, 0, 0):
        functional.dropout(x, 0.5, inplace=True)
    assert torch.equal(x, expected)
