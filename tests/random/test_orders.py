"""Random orders of pipeline stages: run, and equal, or refused, as an oracle that runs the steps says."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.cases.equal import mse, sgd
from tests.equality import eager, planned
from torch import nn

import piper
from piper.errors import OrderError

TOLERANCE, EXAMPLES, WIDTH, STAGES = 1e-10, 100, 3, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))
        self.double()

    def forward(self, x):
        for number, stage in enumerate(self.stages):
            with piper.annotate("PP", number):
                x = stage(x).tanh()
        return x


def batches(rows: int) -> list[eager.Batch]:
    """Two steps' batches."""
    torch.manual_seed(1)
    return [tuple(torch.randn(rows, WIDTH, dtype=torch.float64) for _ in range(2)) for _ in "ab"]


def is_legal(orders_: list[list[tuple[str, int, int]]]) -> bool:
    """Whether devices that run their steps strictly in order, each as soon as its inputs exist, all
    finish.
    """
    done: set[tuple[str, int, int]] = set()
    position = [0] * len(orders_)

    def ready(step: tuple[str, int, int]) -> bool:
        pass_, stage, m = step
        if pass_ == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        return ("F", stage, m) in done and (stage == STAGES - 1 or ("B", stage + 1, m) in done)

    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders_):
            while position[device] < len(order) and ready(order[position[device]]):
                done.add(order[position[device]])
                position[device] += 1
                moved = True
    return all(p == len(order) for p, order in zip(position, orders_, strict=True))


@st.composite
def any_orders(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[list[tuple[str, int, int]]]]:
    """Homes of the stages, microbatches, and one order per device: a legal one with some steps
    moved.
    """
    homes = draw(st.sampled_from([(0, 1, 2), (0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 0, 0)]))
    microbatches = draw(st.integers(1, 3))
    made: list[list[tuple[str, int, int]]] = []
    for device in range(max(homes) + 1):
        mine = [s for s in range(STAGES) if homes[s] == device]
        steps = [("F", s, m) for m in range(microbatches) for s in mine]
        steps += [("B", s, m) for m in range(microbatches) for s in reversed(mine)]
        for _ in range(draw(st.integers(0, 3))):
            step = steps.pop(draw(st.integers(0, len(steps) - 1)))
            steps.insert(draw(st.integers(0, len(steps))), step)
        made.append(steps)
    return homes, microbatches, made


@pytest.mark.timeout(600)
def test_an_order_is_refused_exactly_when_devices_would_wait_for_each_other():
    """The oracle runs the steps; the library must refuse what gets stuck there and run the rest."""
    torch.manual_seed(2)
    model = Model()
    captured = piper.capture(model, mse, batches(4)[0])
    seen: Counter[bool] = Counter()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )
    @given(any_orders())
    def check(drawn: tuple[tuple[int, ...], int, list[list[tuple[str, int, int]]]]) -> None:
        homes, microbatches, made = drawn
        legal = is_legal(made)
        seen[legal] += 1
        strategy = [
            *(piper.Place({"PP": s}, devices=[d]) for s, d in enumerate(homes)),
            piper.Split({}, num_microbatches=microbatches),
            *(
                piper.Order([[{"PASS": p, "PP": s, "MB": m}] for p, s, m in order])
                for order in made
            ),
        ]
        dag = replace(captured, batch_size=2 * microbatches)
        if not legal:
            with pytest.raises(OrderError, match="cycle"):
                piper.apply(dag, strategy)
            return
        plan = piper.plan(piper.apply(dag, strategy))
        piper.verify(plan)
        data = batches(2 * microbatches)
        found = planned.train(plan, {}, model, data, sgd, timeout=30.0, poison=True)
        expected = eager.train(model, mse, data, microbatches, sgd)
        assert planned.compare(found, expected).worst <= TOLERANCE

    check()
    assert min(seen[True], seen[False]) >= EXAMPLES // 5, seen
