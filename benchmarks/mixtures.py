"""The mixture-of-experts decoder that the benchmarks of expert parallelism train: as eager PyTorch
runs it in one process, and as Piper's workers do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import msgspec
import torch
import torch.distributed as dist
from benchmarks.links import Link
from benchmarks.processes import OneOf
from torch._C._distributed_c10d import PrefixStore, Store

import piper
from piper.api.programs import model_tensors
from piper.capture import Captured, capture_with_constants
from piper.devices.gloo import GlooCommunicator
from piper.directives.base import Directive
from piper.ids import DeviceId
from piper.models import MoE, MoEConfig, moe_loss
from piper.ops.all_to_all import ExchangeExperts
from piper.plan.model import Plan
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec, ParamsArgument
from piper.runtime.slices import Slice

Step = Callable[[], object]

SHARING = 2
"""Devices that share experts, one at each end of the link."""

TOLERANCE = 1e-4
"""Of a gradient's error relative to its norm, in float32."""


class Sizes(msgspec.Struct, frozen=True):
    """Model and batch: ``rows`` sequences of ``length`` tokens in each of ``microbatches``
    microbatches of a replica.

    Many small experts, several to a token, as in DeepSeek-V3: what crosses the link takes about as
    long as the computation.
    """

    width: int = 256
    layers: int = 2
    experts: int = 16
    chosen: int = 4
    expert_width: int = 128
    rows: int = 12
    length: int = 128
    microbatches: int = 4

    @property
    def message(self) -> int:
        """Bytes of one all-to-all on one worker: a vector for each choice of each token, float32.
        Half of it leaves the worker.
        """
        return self.chosen * self.rows * self.length * self.width * 4

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.width}, {self.chosen} of {self.experts} experts of width {self.expert_width} per token, "
            f"{self.microbatches} microbatches of {self.rows}×{self.length} tokens, {self.message / 2**20:.1f} MiB per all-to-all and worker"
        )


def build_model(sizes: Sizes, stages: int = 1) -> MoE:
    """The same weights for every number of stages."""
    torch.manual_seed(0)
    return MoE(
        MoEConfig(
            width=sizes.width,
            num_layers=sizes.layers,
            num_experts=sizes.experts,
            experts_per_token=sizes.chosen,
            expert_width=sizes.expert_width,
            capacity_factor=1.0,
            num_stages=stages,
        )
    )


def build_optimizer(parameters: ParamsArgument) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def batch_of(sizes: Sizes, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch: replica r's microbatch m is number r·M + m."""
    rows = SHARING * sizes.microbatches * sizes.rows
    ids = torch.randint(
        0, 256, (rows, sizes.length + 1), generator=torch.Generator().manual_seed(0)
    )[: replicas * sizes.microbatches * sizes.rows]
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# --- equal to one process -----------------------------------------------------------------------


@dataclass
class FirstStep:
    """What a worker saw of its first step: losses by global microbatch, gradients by parameter, and
    of which a part only.
    """

    losses: dict[int, float] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    slices: dict[str, Slice] = field(default_factory=dict)


def one_process(sizes: Sizes) -> FirstStep:
    """Eager PyTorch: all microbatches in sequence, on a model that is not sharded."""
    model = build_model(sizes)
    inputs, targets = batch_of(sizes, SHARING)
    assert isinstance(inputs, torch.Tensor)
    assert isinstance(targets, torch.Tensor)
    count = SHARING * sizes.microbatches
    found = FirstStep()
    for number, (x, y) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
        loss = moe_loss(model(x), y)
        (loss / count).backward()
        found.losses[number] = loss.item()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found.gradients[name] = parameter.grad
    return found


def check_equal(name: str, found: FirstStep, expected: FirstStep) -> float:
    """The largest error of a gradient, relative to its norm. Raises :class:`AssertionError` if
    losses or gradients disagree or are missing.
    """
    assert found.gradients, f"{name}: no gradients"
    for microbatch, loss in found.losses.items():
        right = expected.losses[microbatch]
        assert abs(loss - right) <= 1e-5 * abs(right), (
            f"{name}: microbatch {microbatch}: loss {loss}, in one process {right}"
        )
    largest = max(gradient.norm().item() for gradient in expected.gradients.values())
    errors: dict[str, float] = {}
    for key, gradient in found.gradients.items():
        wanted = found.slices.get(key, Slice()).of(expected.gradients[key]).reshape(-1)
        scale = max(wanted.norm().item(), 1e-6 * largest)
        given = gradient.reshape(-1)[: wanted.numel()]  # without padding
        errors[key] = (given - wanted).norm().item() / scale
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= TOLERANCE, f"{name}: the gradient of {worst} is off by {errors[worst]}"
    return errors[worst]


def check_all(steps: Mapping[str, FirstStep], expected: FirstStep) -> dict[str, float]:
    """The largest error of each variant over all processes; all of them together saw every loss and
    every parameter's gradient.
    """
    worst = {name: check_equal(name, found, expected) for name, found in steps.items()}
    everyone: list[dict[str, tuple[float, set[int], set[str]]]] = [
        {} for _ in range(dist.get_world_size())
    ]
    seen = {n: (worst[n], set(found.losses), set(found.gradients)) for n, found in steps.items()}
    dist.all_gather_object(everyone, seen)
    for name in steps:
        losses = set[int]().union(*(of[name][1] for of in everyone))
        gradients = set[str]().union(*(of[name][2] for of in everyone))
        assert losses == expected.losses.keys(), f"{name}: losses of microbatches {losses}"
        assert gradients == expected.gradients.keys(), f"{name}: gradients of {gradients}"
    return {name: max(of[name][0] for of in everyone) for name in steps}


# --- Piper's workers ----------------------------------------------------------------------------


@cache
def captured_model(sizes: Sizes, stages: int) -> Captured:
    """One capture, at the size of a microbatch, for all strategies."""
    batch = batch_of(sizes, 1)
    return capture_with_constants(
        build_model(sizes, stages), moe_loss, batch, batch_size=sizes.rows
    )


class Trained:
    """One worker of *size*, training under *strategy*; ``first`` is what it saw of its first step.
    A *size* of 1 is a worker by itself, on one replica's microbatches.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        link: Link,
        sizes: Sizes,
        store: Store,
        strategy: Sequence[Directive],
        stages: int = 1,
    ) -> None:
        replicas = 1 if size == 1 else SHARING
        batch = batch_of(sizes, replicas)
        captured = captured_model(sizes, stages)
        dag = replace(captured.dag, batch_size=replicas * sizes.microbatches * sizes.rows)
        self.plan: Plan = piper.plan(piper.apply(dag, list(strategy)))
        piper.verify(self.plan)
        self.device = DeviceId(rank if size > 1 else 0)
        # Every variant has communicators of its own, though of the same names.
        own = PrefixStore(f"{name} {rank if size == 1 else ''}", store)
        self.backend = OneOf(self.device, size, own, link.addresses[rank % 2])
        self.backend.start(size)
        self.backend.load("train", self.plan, signature(batch), captured.constants)
        self.first = FirstStep()
        self._watched = True
        weights = model_tensors(build_model(sizes, stages))
        self.backend.initialise(
            "train", weights, OptimizerSpec(build_optimizer, observe=self._observe)
        )
        self.batch = batch
        done = self.backend.run("train", [batch], first_step=0)
        self.first.losses.update(done.steps[0].values.get("loss", {}))
        self._watched = False

    def _observe(self, gradients: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]) -> None:
        if self._watched:
            self.first.gradients |= {name: found.clone() for name, found in gradients.items()}
            self.first.slices |= slices

    def __call__(self) -> None:
        self.backend.run("train", [self.batch], first_step=0)


class Messages:
    """A plan's all-to-alls, one after the other, as its workers send them; by gloo's own collective
    instead where *plain*.
    """

    def __init__(
        self, name: str, rank: int, link: Link, plan: Plan, store: Store, *, plain: bool = False
    ) -> None:
        moves = [i for i in plan.devices[rank].instructions if isinstance(i, ExchangeExperts)]
        members = moves[0].members
        own = PrefixStore(name, store)
        self._communicator = GlooCommunicator(
            f"{name} {members}", members, DeviceId(rank), own, host=link.addresses[rank % 2]
        )
        self._numbers = [move.messages[0].numel for move in moves]
        self._flat = torch.zeros(max(self._numbers))
        self._out = torch.zeros(max(self._numbers))
        self._plain = plain

    def __call__(self) -> None:
        for number in self._numbers:
            out, flat = self._out[:number], self._flat[:number]
            if self._plain:
                dist.all_to_all_single(out, flat)
                continue
            parts = (number // SHARING,) * SHARING
            self._communicator.all_to_all(out, flat, parts, parts).wait()
