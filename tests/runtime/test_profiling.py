import msgspec
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
from piper.plan.topology import Contention
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.profiling import Network, Replay, measure_profile

LINKS = LinkTimes({SMALL: 1e-5, LARGE: 1e-3}, {SMALL: 1e-4, LARGE: 1e-4 + (LARGE - SMALL) / 1e9})

NETWORK = Network(LINKS, {"all_reduce": {2: LINKS}}, Contention(0.5, 0.25))


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
    profile = measure_profile(planned, optimizer, NETWORK, repeats=1, on_device=seen.append)
    # Replicas do the same.
    assert seen == [0, 2]
    assert len(profile.chunks) == 4
    for exchange in (profile.messages, profile.collectives["all_reduce"][2]):
        assert exchange.link.latency == pytest.approx(1e-4, rel=1e-3)
        assert exchange.link.bandwidth == pytest.approx(1e9)
        assert exchange.issue.seconds(LARGE) == pytest.approx(1e-3)
    assert profile.contention == Contention(0.5, 0.25)
    assert profile.rates["optimizer_step"].seconds(1000) > 0
    mine = planned.devices[0].instructions
    taken = Replay(planned, 0, optimizer).run()
    for instruction, seconds in zip(mine, taken.work, strict=True):
        assert (seconds > 0) >= bool(instruction.reads() or instruction.writes())
    assert sum(taken.work) <= taken.seconds < 60
    packing = profile.rates["reduce_scatter_bucket" if zero else "all_reduce_bucket"]
    assert packing.per_byte > 0
    assert simulate(planned, profile).seconds > 0
    alone = simulate(planned, msgspec.structs.replace(profile, contention=None))
    boxes = [b for d in alone.devices for b in d.boxes() if b.op == "compute"]
    assert {round(b.seconds - profile.launch, 9) for b in boxes} <= {
        round(seconds, 9) for seconds in profile.chunks.values()
    }


@pytest.mark.parametrize("capacity_factor", [1.0, None])
def test_devices_that_share_experts_are_measured(capacity_factor):
    """Each with its part of the experts, and as many tokens for them as the others have."""
    config = MoEConfig(
        width=16, num_layers=1, num_heads=2, num_experts=4, capacity_factor=capacity_factor
    )
    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randint(0, 256, (8, 8), generator=generator) for _ in range(2))
    directives = [
        Place({}, [0, 1]),
        Replicate({}),
        Shard({"EP": "*"}),
        Split({}, num_microbatches=2),
    ]
    planned = plan(apply(capture(MoE(config), moe_loss, batch), directives))
    profile = measure_profile(
        planned,
        OptimizerSpec(lambda p: torch.optim.SGD(p, lr=0.1)),
        NETWORK,
        repeats=1,
        batch=batch,
    )
    op = "exchange_rows" if capacity_factor is None else "exchange_experts"
    assert profile.rates[op].per_byte > 0
    assert profile.unpacking[op].per_byte > 0
    assert simulate(planned, profile).seconds > sum(profile.chunks.values()) / 2
