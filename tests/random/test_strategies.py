"""Random models under random strategies: equal to plain PyTorch, or refused with a reason. Never
silently wrong, never hung.
"""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from tests.equality import eager, planned
from tests.random.models import KINDS, WIDTH, Model, Sketch, sketches
from tests.random.strategies import Recipe, directives, orders, recipes

import piper
from piper.api.programs import Programs
from piper.errors import CaptureError, DirectiveError, OrderError, PiperError
from piper.runtime.random import DrawFrom

TOLERANCE = 1e-10
EXAMPLES = 100
SEED = 5


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches(rows: int) -> list[eager.Batch]:
    """Two steps' batches; the first row is valid, so that a weighted loss has a weight."""
    torch.manual_seed(1)
    made = [
        (torch.randn(rows, WIDTH).double(), torch.randn(rows, WIDTH).double()) for _ in range(2)
    ]
    for _, targets in made:
        targets[0, 0] = 1.0
    return made


def outcome(sketch: Sketch, recipe: Recipe) -> str:
    """``equal``, or why the strategy was refused. Raises for anything else."""
    torch.manual_seed(2)
    model = Model(sketch)
    data = batches(recipe.batch_size)
    strategy = directives(recipe, sorted(sketch.regions, key=str))
    certain = False
    try:
        program = Programs(model, model.loss, strategy).training(data[0])
        plan = program.plan
        if recipe.order_seed is not None:
            ordered, certain = orders(plan.dag, recipe.order_seed)
            plan = piper.plan(piper.apply(program.captured.dag, [*strategy, *ordered]))
            piper.verify(plan)
    except OrderError:
        assert not certain, "a linear extension was refused"
        return "order"
    except DirectiveError as error:
        return _refusal(sketch, recipe, error)
    except CaptureError as error:
        if "does not depend on any" not in str(error):
            raise
        return "nothing trained"
    found = planned.train(
        plan, program.constants, model, data, sgd, seed=SEED, timeout=30.0, poison=True
    )
    expected = eager.train(
        model,
        model.loss,
        data,
        plan.num_replicas * plan.num_microbatches,
        sgd,
        around=lambda step, m: DrawFrom(SEED, step, m),
    )
    worst = planned.compare(found, expected)
    assert worst.worst <= TOLERANCE, worst
    return "equal"


def _refusal(sketch: Sketch, recipe: Recipe, error: PiperError) -> str:
    """The kind of refusal, if it is one that this strategy may meet."""
    text = str(error)
    writes = any(layer.kind == "counter" for layer in sketch.layers)
    if "writes buffer" in text and "replicas" in text:
        assert writes
        assert recipe.replicas > 1
        return "buffer written by replicas"
    if "is written by" in text:
        assert writes
        return "buffer written and read on several devices"
    raise error


def explore(kinds: tuple[str, ...], least_equal: int) -> None:
    """Check random cases; at least *least_equal* of them must have run."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking takes longer than a test may
        suppress_health_check=list(HealthCheck),
    )
    @given(sketches(kinds=kinds), recipes)
    def check(sketch: Sketch, recipe: Recipe) -> None:
        found = outcome(sketch, recipe)
        event(found)
        outcomes[found] += 1

    check()
    assert outcomes["equal"] >= least_equal, outcomes


@pytest.mark.full
@pytest.mark.timeout(600)
def test_any_strategy_for_stateless_models():
    """Skips, several outputs, tied and frozen weights, dropout, in-place operations; regions
    nested, entered again, or none.
    """
    explore(tuple(kind for kind in KINDS if kind != "counter"), EXAMPLES * 9 // 10)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_any_strategy_for_models_that_write_buffers():
    """A buffer's microbatches follow each other; under replicas or on two devices there is no such
    sequence: refused.
    """
    explore(("linear", "counter", "tied", "dropout", "norm"), EXAMPLES // 3)
