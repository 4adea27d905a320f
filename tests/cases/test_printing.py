"""What is printed of large things: a line that says what they are."""

import pytest
import torch
from rich.pretty import pretty_repr
from torch import Tensor, nn

import piper
from piper.capture import capture_with_constants

F = torch.nn.functional


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i, stage in enumerate(self.stages):
            with piper.annotate("PP", i):
                x = stage(x)
        return x


BATCH = torch.randn(64, 4), torch.randn(64, 4)
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], 32)


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    captured = capture_with_constants(Stages(), F.mse_loss, BATCH)
    placed = piper.apply(captured.dag, STRATEGY)
    plan = piper.plan(placed)
    timeline = piper.simulate(plan)
    found = [captured, captured.dag, placed, plan, plan.devices[0], timeline, timeline.devices[0]]
    found += [timeline.devices[0].lanes[0], timeline.devices[0].memory]
    found += [*list(placed.nodes.values())[:3], next(placed.comms()), *placed.bodies.values()]
    options = {"optimizer": torch.optim.AdamW}
    found.append(piper.check(Stages(), F.mse_loss, STRATEGY, BATCH, steps=1, **options))
    with piper.compile(
        Stages(), F.mse_loss, STRATEGY, BATCH, backend="inprocess", **options
    ) as trainer:
        trainer.step(*BATCH)
        path = tmp_path_factory.mktemp("saved") / "checkpoint"
        trainer.save(path)
        found += [trainer, trainer.program, trainer._programs, trainer._snapshot(optimizer=True)]
        found += [trainer._snapshot(optimizer=True).optimizer, piper.Checkpoint.open(path)]
        assert "1 step done" in repr(trainer)
        assert "open" in repr(trainer)
    assert "closed" in repr(trainer)
    return found


def test_two_lines_at_most_wherever_it_is_shown(things):
    for thing in things:
        for text in (repr(thing), f"{thing!r}", repr([thing]), pretty_repr(thing, max_width=400)):
            assert len(text) < 400, (type(thing), text)
            assert text.count("\n") <= 1, text
        assert repr(thing).startswith(f"{type(thing).__name__}(")


def test_it_says_what_there_is(things):
    by_kind = {type(thing).__name__: repr(thing) for thing in things}
    assert "2 devices" in by_kind["Plan"]
    assert "32 microbatches of 2 rows" in by_kind["Plan"]
    assert "4 parameters" in by_kind["Dag"]
    assert "equal after 1 step" in by_kind["CheckReport"]
    assert "1 step done" in by_kind["Checkpoint"]
    assert "PP=" in by_kind["Chunk"]
    assert "simulated" in by_kind["Timeline"]
