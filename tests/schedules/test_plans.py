"""The plans that schedules lead to: every device computes in the schedule's order, in the published
time.
"""

import pytest
import torch
from tests.schedules.unit_time import EQUAL, groups, run_groups

import piper
from piper.api.strategies import pipeline, stages_per_group
from piper.directives.order import Order
from piper.models import MLP, MLPConfig, mlp_loss
from piper.ops.compute import Compute
from piper.simulate.playback import play

RANKS, MICROBATCHES = 4, 8
SCHEDULES = ["zb_h1", "interleaved_zero_bubble", "zbv", "dualpipe", "dualpipev"]


def virtual(name):
    return 2 if name == "interleaved_zero_bubble" else stages_per_group(name)


def planned(name):
    num_stages = RANKS * virtual(name)
    model = MLP(
        MLPConfig(
            in_features=3, width=4, out_features=2, num_layers=num_stages, num_stages=num_stages
        )
    )
    batch = torch.randn(MICROBATCHES * 2, 3), torch.randn(MICROBATCHES * 2, 2)
    strategy = pipeline(
        name, [[r] for r in range(RANKS)], MICROBATCHES, num_virtual_stages=virtual(name)
    )
    plan = piper.plan(piper.apply(piper.capture(model, mlp_loss, batch), strategy))
    piper.verify(plan)
    return plan, [groups(d) for d in strategy if isinstance(d, Order)]


def chunk(plan, instruction):
    node = plan.dag.nodes[instruction.node]
    tags = dict(node.tags)
    return node.pass_.value, tags["PP"], tags["MB"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_devices_compute_in_the_order_of_the_schedule(name):
    plan, ranks = planned(name)
    for device, rank in zip(plan.devices, ranks, strict=True):
        # The first stage has no gradient to send: its backward has no input half.
        own = [[c for c in group if c[:2] != ("BI", 0)] for group in rank]
        computed = iter([chunk(plan, i) for i in device.instructions if isinstance(i, Compute)])
        for group in own:
            assert {next(computed) for _ in group} == set(group)
        assert next(computed, None) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_step_takes_no_longer_than_published(name):
    plan, ranks = planned(name)

    def seconds(_device, instruction):
        if not isinstance(instruction, Compute):
            return 0.0
        return float(EQUAL[chunk(plan, instruction)[0]])

    total = max(played.end for timeline in play(plan, seconds) for played in timeline)
    published = run_groups(ranks, RANKS * virtual(name)).total
    assert published - RANKS <= total <= published
