import pytest
import torch

from piper import (
    Place,
    Replicate,
    Shard,
    Split,
    apply,
    capture,
    plan,
    simulate,
    strategies,
)
from piper.devices.links import LARGE, SMALL, LinkTimes
from piper.models import MoE, MoEConfig, moe_loss
from piper.models.transformer import Transformer, TransformerConfig, transformer_loss
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.profiling import Replay, measure_profile

LINKS = LinkTimes({SMALL: 1e-5, LARGE: 1e-3}, {SMALL: 1e-4, LARGE: 1e-4 + (LARGE - SMALL) / 1e9})


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_chunk_of_a_plan_is_measured(zero):
    """Integer inputs, dropout and all; with the profile the plan can be simulated."""
    config = TransformerConfig(
        context=8, width=16, num_layers=2, num_heads=2, num_stages=2, dropout=0.1
    )
    batch = torch.zeros(8, 8, dtype=torch.int64), torch.zeros(8, 8, dtype=torch.int64)
    dag = capture(Transformer(config), transformer_loss, batch)
    planned = plan(apply(dag, strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=zero)))
    seen = []
    optimizer = OptimizerSpec(lambda p: torch.optim.AdamW(p, lr=1e-3))
    profile = measure_profile(planned, optimizer, LINKS, repeats=1, on_device=seen.append)
    # Replicas do the same.
    assert seen == [0, 2]
    assert len(profile.chunks) == 4
    assert profile.latency == 1e-4
    assert abs(profile.bandwidth / 1e9 - 1) < 1e-9
    assert profile.rates["optimizer_step"].seconds(1000) > 0
    local = [i for i in planned.devices[0].instructions if i.reads() and not i.asynchronous]
    taken = Replay(planned, 0, optimizer).run()
    assert sum(seconds > 0 for seconds in taken) >= len(local)
    line = simulate(planned, profile)
    boxes = [b for d in line.devices for b in d.boxes() if b.op == "compute"]
    assert {round(b.seconds - profile.launch, 9) for b in boxes} <= {
        round(seconds, 9) for seconds in profile.chunks.values()
    }


@pytest.mark.parametrize("shard_grads", [False, True])
@pytest.mark.parametrize("capacity_factor", [1.0, None])
def test_a_device_that_holds_a_part_of_the_experts_is_measured(capacity_factor, shard_grads):
    config = MoEConfig(
        width=16,
        num_layers=1,
        num_experts=4,
        expert_width=16,
        capacity_factor=capacity_factor,
    )
    batch = torch.zeros(8, 8, dtype=torch.int64), torch.zeros(8, 8, dtype=torch.int64)
    shared = [
        Place({}, [0, 1]),
        Replicate({}, shard_grads=shard_grads),
        Shard({"EP": 0}),
        Split({}, num_microbatches=2),
    ]
    planned = plan(apply(capture(MoE(config), moe_loss, batch), shared))
    profile = measure_profile(
        planned, OptimizerSpec(lambda p: torch.optim.AdamW(p, lr=1e-3)), LINKS, repeats=1
    )
    bodies = {i.body for i in planned.devices[0].instructions if i.op == "compute"}
    assert len(profile.chunks) == len(bodies)
    assert all(seconds > 0 for seconds in profile.chunks.values())
