"""The sections of the TOML file of a training run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec
import torch
from msgspec import Meta
from msgspec.structs import asdict

from piper.api.memory import make_limits
from piper.api.strategies import pipeline
from piper.backends import Backend, make_backend
from piper.capture.precision import LossScale, Precision, make_precision, policy_name
from piper.capture.type_names import floating_type
from piper.devices.tensors import dtype_name
from piper.directives.base import Directive
from piper.directives.strategy import load_strategy
from piper.planner.budget import Limits

Count: TypeAlias = Annotated[int, Meta(ge=1)]

Index: TypeAlias = Annotated[int, Meta(ge=0)]

Positive: TypeAlias = Annotated[float, Meta(gt=0)]

NonNegative: TypeAlias = Annotated[float, Meta(ge=0)]

ZeroLevel: TypeAlias = Annotated[int, Meta(ge=0, le=3)]

Fraction: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]

ParamGroups: TypeAlias = Iterable[torch.Tensor] | Iterable[dict[str, object]]


class TransformerSection(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="transformer",
    tag_field="kind",
):
    """``[model]``: a decoder-only transformer over bytes.

    *num_stages* (regions named PP) defaults to what the strategy's groups hold, and to 1 under a
    strategy file.
    """

    num_layers: Count = 4
    width: Count = 256
    num_heads: Count = 4
    mlp_ratio: Count = 4
    dropout: Fraction = 0.0
    tied_embedding: bool = False
    num_stages: Count | None = None


class DataSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[data]``: text files or glob patterns; none means the Python standard library's source.

    *max_bytes* caps the corpus, *held_out* is the part of it that is never trained on.
    """

    files: tuple[str, ...] = ()
    max_bytes: Count = 8_000_000
    held_out: Annotated[float, Meta(gt=0, le=0.5)] = 0.1


class StrategySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[strategy]``: a named pipeline schedule over device groups, or a file of directives.

    *groups*: one list of devices per pipeline rank, the devices of a list being replicas of each
    other. *num_virtual_stages* counts stages per group, for the schedules that have more than one.
    *zero* is what the devices of a list shard: nothing (0, the default), optimizer state (1),
    gradients too (2), parameters too (3). *bucket_size* in MiB; without it a bucket per region.
    """

    schedule: str | None = None
    groups: tuple[tuple[Index, ...], ...] | None = None
    num_microbatches: Count | None = None
    num_virtual_stages: Count | None = None
    zero: ZeroLevel | None = None
    bucket_size: Positive | None = None
    file: str | None = None

    def directives(self) -> list[Directive]:
        """The strategy itself.

        Raises:
            PiperError: the file is malformed, or the schedule unknown or not for these groups.
        """
        if self.file is not None:
            return load_strategy(self.file)
        assert self.schedule is not None
        assert self.groups is not None
        assert self.num_microbatches is not None
        return pipeline(
            self.schedule,
            self.groups,
            self.num_microbatches,
            num_virtual_stages=self.num_virtual_stages,
            zero=self.zero or 0,
            bucket_size=self.bucket_size,
        )


class AdamWSection(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="adamw",
    tag_field="name",
):
    """``[optimizer]`` with ``name = "adamw"``, the default."""

    lr: Positive = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.01

    def build(self, params: ParamGroups) -> torch.optim.Optimizer:
        """The optimizer over *params*."""
        return torch.optim.AdamW(
            params, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
        )


class AdamSection(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="adam",
    tag_field="name",
):
    """``[optimizer]`` with ``name = "adam"``; its weight decay is an L2 penalty."""

    lr: Positive = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0

    def build(self, params: ParamGroups) -> torch.optim.Optimizer:
        """The optimizer over *params*."""
        return torch.optim.Adam(
            params, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
        )


class SGDSection(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="sgd",
    tag_field="name",
):
    """``[optimizer]`` with ``name = "sgd"``."""

    lr: Positive = 1e-2
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0

    def build(self, params: ParamGroups) -> torch.optim.Optimizer:
        """The optimizer over *params*."""
        return torch.optim.SGD(
            params,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )


OptimizerSection: TypeAlias = AdamWSection | AdamSection | SGDSection


class LossScaleSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[train.precision.loss_scale]``, see :class:`piper.LossScale`."""

    init: Positive = 2.0**16
    growth: Annotated[float, Meta(gt=1)] = 2.0
    backoff: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    growth_interval: Count = 2000


class PrecisionSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[train.precision]``: element types by their names, and how the loss is scaled, if it is.
    See :class:`piper.Precision`.
    """

    compute: str = "bfloat16"
    reduce: str = "float32"
    master: str = "float32"
    output: str = "float32"
    loss_scale: LossScaleSection | None = None

    def types(self) -> dict[str, str]:
        """The names of the types by field."""
        return {f: getattr(self, f) for f in ("compute", "reduce", "master", "output")}


class TrainSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[train]``: *batch_size* sequences over all replicas, *seq_len* bytes each.

    The learning rate grows linearly over the first *warmup_steps* steps. Gradients whose norm (over
    all parameters) is above *max_grad_norm* are scaled down to it. The held-out loss is taken every
    *eval_every* steps over *eval_batches* batches. The run ends after *steps* steps or
    *max_minutes* minutes, whichever comes first; then one process repeats the first
    *reference_steps* of its steps, for comparison, in float32 whatever the *precision* is: the name
    of a type ("bf16", "fp16", "float32", "float64"; "bfloat16" and the like are the same), or a
    section of its own. *compile* puts every chunk
    through TorchInductor before the first step: true, false, or "fallback" (chunks that cannot be
    compiled run as they are). *address* is that of a running Ray cluster; without it Ray is started
    on this machine. A checkpoint is written every *checkpoint_every* steps and at the end, under
    ``checkpoints`` in *out_dir*; the last *keep_checkpoints* are kept. *resume* is a checkpoint to
    go on from, or the folder of a run, to go on from its last.
    """

    steps: Count = 500
    batch_size: Count = 16
    seq_len: Count = 128
    warmup_steps: Index = 0
    max_grad_norm: Positive | None = None
    precision: str | PrecisionSection | None = None
    eval_every: Count = 100
    eval_batches: Count = 16
    reference_steps: Index = 100
    max_minutes: Positive | None = None
    seed: Index = 0
    backend: Literal["ray", "inprocess"] = "ray"
    compile: bool | Literal["fallback"] = False
    address: str | None = None
    out_dir: str = "runs/latest"
    checkpoint_every: Count | None = None
    keep_checkpoints: Count = 2
    resume: str | None = None

    def make_backend(self) -> Backend:
        """The backend; nothing is started yet."""
        if self.address is not None:
            return make_backend(self.backend, address=self.address)
        return make_backend(self.backend)

    def policy(self) -> Precision | None:
        """The mixed-precision policy.

        Raises:
            ConfigError: an unknown name, or types that do not go together.
        """
        given = self.precision
        if given is None or isinstance(given, str):
            return make_precision(given)
        scale = given.loss_scale
        return Precision(
            **{field: floating_type(name, field) for field, name in given.types().items()},
            loss_scale=None if scale is None else LossScale(**asdict(scale)),
        )

    def precision_as_data(self) -> object:
        """*precision* in numbers and texts, the same for all names of a type."""
        given = self.precision
        if given is None:
            return None
        if isinstance(given, str):
            return policy_name(given)
        types = {
            field: dtype_name(floating_type(name, field)) for field, name in given.types().items()
        }
        return {**msgspec.to_builtins(given), **types}

    def warmup(self) -> "Warmup | None":
        """The schedule of the learning rate, if it has one."""
        return Warmup(self.warmup_steps) if self.warmup_steps else None


@dataclass(frozen=True, slots=True)
class Warmup:
    """Factor on the learning rate in step 0, 1, …: ``1/steps``, ``2/steps``, up to 1 and then 1."""

    steps: int

    def __call__(self, step: int) -> float:
        """The factor in *step*."""
        return min(1.0, (step + 1) / self.steps)


class MemorySection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[memory]``: sizes in bytes, or texts such as ``"512MiB"``.

    *budget* bounds what any device needs for a step, as planned. *receive_bytes*, *gather_bytes*
    and *fetch_bytes* bound what a device receives, gathers of sharded parameters, and brings back
    from host memory before it is needed, *reduce_bytes* what reductions have in flight; without
    them the planner chooses.
    """

    budget: Index | str | None = None
    receive_bytes: Index | str | None = None
    gather_bytes: Index | str | None = None
    fetch_bytes: Index | str | None = None
    reduce_bytes: Index | str | None = None

    def limits(self) -> Limits:
        """What the planner wants to know.

        Raises:
            ConfigError: a text that is no size.
        """
        return make_limits(
            self.budget, self.receive_bytes, self.gather_bytes, self.fetch_bytes, self.reduce_bytes
        )
