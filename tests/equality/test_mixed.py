"""bfloat16 under every kind of strategy equals plain PyTorch with the same policy: in `make test` a
part in which every pair of factor values occurs, with `-m full` all.
"""

import pytest
import torch
from tests.equality import mixed, planned
from tests.equality.matrix import adam
from tests.equality.mixed import FACTORS, TOLERANCE, Case, all_cases, covering_cases, plan_of, run
from tests.support.covering import every_pair

import piper
from piper.dtypes import DType
from piper.ir.dag import Role
from piper.models import Transformer, TransformerConfig, transformer_loss


def test_every_pair_of_factor_values_is_covered():
    found = {pair for case in covering_cases() for pair in case.pairs}
    wanted = every_pair(FACTORS)
    assert found == wanted
    assert len(set(covering_cases())) == len(covering_cases()) < len(all_cases()) == 96


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [c for c in all_cases() if c not in covering_cases()], ids=str)
def test_all_equal_to_plain_pytorch(case: Case):
    assert run(case).worst <= TOLERANCE


def test_gradients_of_a_tied_weight_are_added_up_in_the_reduce_type():
    """Autograd by itself adds up those of one bfloat16 copy in bfloat16: that is another sum, by
    far more than the tolerance.
    """
    case = Case("1f1b", 0, 1, recompute=False, tied=True)
    model, batches = mixed._model(2, True), mixed._batches(mixed.MICROBATCHES)
    shared = mixed.train(
        model, transformer_loss, batches, mixed.MICROBATCHES, adam, copy_per_name=False
    )
    constants = mixed._captured(2, True).constants
    found = planned.train(plan_of(case), constants, model, batches, adam)
    assert planned.compare(found, shared).gradients > 10 * TOLERANCE
    assert planned.compare(found, mixed._expected(2, True, mixed.MICROBATCHES)).worst <= TOLERANCE


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_is_sent_and_kept(zero: int):
    """Gathers carry bfloat16, reductions float32; ZeRO-3 keeps nothing but slices of master
    weights.
    """
    plan = plan_of(Case("1f1b", zero, 2, recompute=False, tied=False))
    carried: dict[str, set[DType]] = {}
    for mine in plan.devices:
        for instruction in mine.instructions:
            if (meeting := instruction.rendezvous()) is not None:
                types = {message.dtype for message in meeting.messages}
                carried.setdefault(meeting.role, set()).update(types)
    reduces = "reduce_scatter" if zero else "all_reduce"
    assert carried[reduces] == {DType.FLOAT32}
    assert carried["send"] == {DType.BFLOAT16}
    gathers = {0: None, 1: "refresh", 2: "refresh", 3: "all_gather"}[zero]
    assert carried.get(gathers) == (None if gathers is None else {DType.BFLOAT16})
    elements = sum(p.spec.numel() for p in plan.dag.parameters.values())
    held: dict[Role, int] = {}
    for info in (info for mine in plan.devices for info in mine.slots):
        if info.role in (Role.PARAMETER, Role.SHARD):
            held[info.role] = held.get(info.role, 0) + info.message.nbytes
    padding = 4 * 2 * len(plan.dag.parameters)
    copies = 2 if zero == 0 else 1
    assert 4 * copies * elements <= held[Role.SHARD] <= 4 * copies * elements + padding
    assert held.get(Role.PARAMETER, 0) == (0 if zero == 3 else 2 * 2 * elements)


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_ray_and_threads_agree(precision: str):
    """Processes and gloo; under ZeRO-3, which gathers, reduces and scatters, with clipping."""

    def train(backend: str):
        torch.manual_seed(0)
        config = TransformerConfig(
            vocab_size=7, context=4, width=8, num_layers=2, num_heads=2, num_stages=2
        )
        ids = torch.randint(0, 7, (8, 4))
        batch = (ids, ids.roll(1, 1))
        strategy = piper.strategies.pipeline("1f1b", [[0, 1], [2, 3]], 2, zero=3, bucket_size=1e-3)
        with piper.compile(
            Transformer(config),
            transformer_loss,
            strategy,
            batch,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2, eps=1e-3),
            backend=backend,
            precision=precision,
            max_grad_norm=0.1,
            verify_capture=False,
        ) as trainer:
            results = [trainer.step(*batch) for _ in range(3)]
            return [(r.loss, r.loss_scale, r.skipped) for r in results], trainer.state_dict()

    (found, state), (expected, reference) = train("ray"), train("inprocess")
    for one, other in zip(found, expected, strict=True):
        assert one == (pytest.approx(other[0], rel=1e-6), *other[1:])
    for name, tensor in reference.items():
        assert tensor.dtype == torch.float32
        error = (state[name] - tensor).norm() / tensor.norm().clamp(min=1e-3)
        assert error <= 1e-6, name
