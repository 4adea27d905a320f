"""The TOML file of a training run, checked whole before anything starts.

Sections: ``[model]``, ``[data]``, ``[strategy]``, ``[optimizer]``, ``[train]``, ``[memory]``. Only the strategy has no
default. Paths in ``data.files`` and ``strategy.file`` are relative to the file's own folder,
``train.out_dir`` and ``train.resume`` to the current one.
"""

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import torch
from msgspec import Meta, inspect
from msgspec.structs import asdict, replace

from piper.api.memory import make_limits
from piper.api.strategies import pipeline, stages_per_group
from piper.backends import Backend, make_backend
from piper.capture.precision import LossScale, Precision, make_precision
from piper.devices.tensors import torch_dtype
from piper.directives.base import Directive
from piper.directives.strategy import load_strategy
from piper.errors import ConfigError, PiperError, nearest
from piper.models.transformer import TransformerConfig
from piper.planner.budget import Limits
from piper.training.data import VOCAB_SIZE, TextBatches

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
MODEL_KINDS = ("transformer",)
OPTIMIZER_NAMES = ("adamw", "adam", "sgd")


class LossScaleSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[train.precision.loss_scale]``, see :class:`piper.LossScale`."""

    init: Positive = 2.0**16
    growth: Annotated[float, Meta(gt=1)] = 2.0
    backoff: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    growth_interval: Count = 2000


FloatingType: TypeAlias = Literal["float64", "float32", "float16", "bfloat16"]


class PrecisionSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[train.precision]``: element types by torch's names, and how the loss is scaled, if it is. See :class:`piper.Precision`."""

    compute: FloatingType = "bfloat16"
    reduce: FloatingType = "float32"
    master: FloatingType = "float32"
    output: FloatingType = "float32"
    loss_scale: LossScaleSection | None = None


class TrainSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[train]``: *batch_size* sequences over all replicas, *seq_len* bytes each.

    The learning rate grows linearly over the first *warmup_steps* steps. Gradients whose norm (over
    all parameters) is above *max_grad_norm* are scaled down to it. The held-out loss is taken
    every *eval_every* steps over *eval_batches* batches. The run ends after *steps* steps or
    *max_minutes* minutes, whichever comes first; then one process repeats the first *reference_steps*
    of its steps, for comparison, in float32 whatever the *precision* is: its name ("bf16", "fp16", "float32", "float64"), or a section of
    its own. *compile* puts every chunk through TorchInductor before the first step: true, false, or "fallback" (chunks
    that cannot be compiled run as they are). *address* is that of a running Ray cluster; without it Ray is started
    on this machine. A checkpoint is written every *checkpoint_every* steps and at the end, under ``checkpoints`` in *out_dir*; the last
    *keep_checkpoints* are kept. *resume* is a checkpoint to go on from, or the folder of a run, to go on from its last.
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
            compute=torch_dtype(given.compute),
            reduce=torch_dtype(given.reduce),
            master=torch_dtype(given.master),
            output=torch_dtype(given.output),
            loss_scale=None if scale is None else LossScale(**asdict(scale)),
        )

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

    *budget* bounds what any device needs for a step, as planned. *receive_bytes*, *gather_bytes* and *fetch_bytes* bound what a
    device receives, gathers of sharded parameters, and brings back from host memory before it is needed, *reduce_bytes* what reductions have in
    flight; without them the planner chooses.
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


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run, as ``load_config`` returns it."""

    strategy: StrategySection
    model: TransformerSection = TransformerSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = AdamWSection()
    train: TrainSection = TrainSection()
    memory: MemorySection = MemorySection()

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the model: as given, else as many as the groups hold, else one."""
        if self.model.num_stages is not None:
            return self.model.num_stages
        strategy = self.strategy
        if strategy.groups is None or strategy.schedule is None:
            return 1
        return len(strategy.groups) * stages_per_group(
            strategy.schedule, strategy.num_virtual_stages
        )

    def transformer(self) -> TransformerConfig:
        """The model's sizes; vocabulary, context and stages follow from the other sections.

        Raises:
            ConfigError: the sizes contradict each other.
        """
        return TransformerConfig(
            vocab_size=VOCAB_SIZE,
            context=self.train.seq_len,
            width=self.model.width,
            num_layers=self.model.num_layers,
            num_heads=self.model.num_heads,
            mlp_ratio=self.model.mlp_ratio,
            dropout=self.model.dropout,
            tied_embedding=self.model.tied_embedding,
            num_stages=self.num_stages,
        )

    def batches(self) -> TextBatches:
        """The training and held-out batches; no file is read yet."""
        return TextBatches(
            batch_size=self.train.batch_size,
            seq_len=self.train.seq_len,
            seed=self.train.seed,
            files=self.data.files,
            max_bytes=self.data.max_bytes,
            held_out=self.data.held_out,
        )


def load_config(path: str | Path) -> RunConfig:
    """Read and check the TOML file at *path*.

    Raises:
        ConfigError: the file is missing or not TOML; a field is unknown (with the nearest known one),
            of the wrong type or out of range (with its path, what was expected and what was found);
            fields that need or exclude each other; a strategy that does not exist.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a TOML configuration file: {error.strerror}"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    _check_finite(path, "", raw)
    config = _convert(path, raw)
    _check_strategy(path, config.strategy)
    _check_optimizer(path, config.optimizer)
    _check_train(path, config.train)
    config = _relative_to(path.parent, config)
    try:
        config.memory.limits()
    except ConfigError as error:
        raise ConfigError(f"{path}: [memory]: {error}") from error
    try:
        config.train.policy()
    except ConfigError as error:
        raise ConfigError(f"{path}: train.precision: {error}") from error
    try:
        config.strategy.directives()
    except PiperError as error:
        raise ConfigError(f"{path}: [strategy]: {error}") from error
    try:
        config.transformer()
    except ConfigError as error:
        raise ConfigError(f"{path}: [model]: {error}") from error
    return config


def _check_finite(path: Path, field: str, value: object) -> None:
    """No number of a run may be ``inf`` or ``nan``, though TOML has both."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {field}: expected a finite number, found {value}")
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(path, f"{field}.{name}" if field else str(name), item)
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_finite(path, f"{field}[{index}]", item)


def _convert(path: Path, raw: dict[str, object]) -> RunConfig:
    """*raw* as a ``RunConfig``; errors name *path* and the field."""
    optimizer = raw.get("optimizer")
    if isinstance(optimizer, dict):
        raw = {**raw, "optimizer": {"name": "adamw", **optimizer}}
    try:
        return msgspec.convert(raw, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_explain(str(error), raw)}") from error


def _explain(message: str, raw: object) -> str:
    """Msgspec's *message* about *raw* as field path, what was expected and what was found."""
    problem, _, where = message.partition(" - at `$")
    steps = re.findall(r"\w+", where)
    field = where.rstrip("`").lstrip(".")
    if unknown := re.search(r"unknown field `(.+)`", problem):
        known = _known_fields(steps, raw)
        name = unknown[1]
        place = f"{field}.{name}" if field else name
        return f"{place}: unknown field{nearest(name, known)}; known here: {', '.join(known)}"
    if missing := re.search(r"missing required field `(.+)`", problem):
        return f"{missing[1]}: expected this {'field' if field else 'section'}, found none"
    found = _found(_lookup(raw, steps))
    if problem.startswith("Invalid"):
        allowed = ", ".join(_found(value) for value in _allowed(steps, raw))
        return f"{field}: expected one of {allowed}, found {found}"
    expected = problem.removeprefix("Expected ").partition(", got")[0]
    return f"{field}: expected {_in_toml_words(expected)}, found {found}"


_TOML_WORDS = {
    "`object`": "a section",
    "`array`": "an array",
    "`int`": "an integer",
    "`float`": "a number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`bool | str`": "true, false or a string",
    "`array | null`": "an array",
    "`int | null`": "an integer",
    "`float | null`": "a number",
    "`str | null`": "a string",
    "`int | str | null`": 'bytes, or a text such as "512MiB"',
}


def _in_toml_words(expected: str) -> str:
    for name, words in _TOML_WORDS.items():
        if expected.startswith(name):
            return words + expected.removeprefix(name)
    return expected


def _found(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"an array of {len(value)}: {value!r}"
    return repr(value)


def _lookup(raw: object, steps: list[str]) -> object:
    for step in steps:
        if isinstance(raw, dict):
            raw = raw[step]
        elif isinstance(raw, list):
            raw = raw[int(step)]
    return raw


def _type_at(steps: list[str], raw: object) -> inspect.Type:
    """The declared type at the path *steps*, choosing among tagged sections by the tag in *raw*."""
    kind: inspect.Type = inspect.type_info(RunConfig)
    for step in steps:
        kind, value = _chosen(kind, raw), _lookup(raw, [step])
        if not isinstance(kind, inspect.StructType) or step == kind.tag_field:
            break
        fields = {field.encode_name: field.type for field in kind.fields}
        kind, raw = fields[step], value
    return kind


def _chosen(kind: inspect.Type, value: object) -> inspect.Type:
    """Of a union, the member without ``None`` that *value* is tagged as, else the first."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    sections = [member for member in members if isinstance(member, inspect.StructType)]
    if not isinstance(value, dict):
        return members[0]
    for member in sections:
        if member.tag_field is not None and value.get(member.tag_field) == member.tag:
            return member
    return (sections or members)[0]


def _known_fields(steps: list[str], raw: object) -> list[str]:
    kind = _chosen(_type_at(steps, raw), _lookup(raw, steps))
    if not isinstance(kind, inspect.StructType):
        return []
    tag = [kind.tag_field] if kind.tag_field is not None else []
    return tag + [field.encode_name for field in kind.fields]


def _allowed(steps: list[str], raw: object) -> list[object]:
    """The values that the literal (perhaps besides true and false) or the tag at the path *steps* may take."""
    kind = _type_at(steps, raw)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    literals = [v for m in members if isinstance(m, inspect.LiteralType) for v in m.values]
    if literals:
        booleans = any(isinstance(member, inspect.BoolType) for member in members)
        return [*([True, False] if booleans else []), *literals]
    tags = {"kind": MODEL_KINDS, "name": OPTIMIZER_NAMES}
    return list(tags[steps[-1]])


def _check_strategy(path: Path, strategy: StrategySection) -> None:
    """Either a file, or a schedule with its groups and number of microbatches."""
    if (strategy.file is None) == (strategy.schedule is None):
        found = "neither" if strategy.file is None else "both"
        raise ConfigError(f"{path}: [strategy]: expected either schedule or file, found {found}")
    companions = {
        "groups": strategy.groups,
        "num_microbatches": strategy.num_microbatches,
        "num_virtual_stages": strategy.num_virtual_stages,
        "zero": strategy.zero,
        "bucket_size": strategy.bucket_size,
    }
    given = [name for name, value in companions.items() if value is not None]
    if strategy.file is not None and given:
        raise ConfigError(
            f"{path}: strategy.{given[0]}: a strategy file already says this; "
            f"remove {', '.join(given)} or use schedule in place of file"
        )
    for name in ("groups", "num_microbatches"):
        if strategy.file is None and name not in given:
            raise ConfigError(
                f"{path}: strategy.{name}: expected a value with schedule, found none"
            )
    _check_groups(path, strategy.groups)


def _check_groups(path: Path, groups: tuple[tuple[int, ...], ...] | None) -> None:
    if groups is None:
        return
    if not groups or not all(groups):
        raise ConfigError(
            f"{path}: strategy.groups: expected at least one device in each group, such as "
            f"[[0, 1], [2, 3]], found {[list(group) for group in groups]}"
        )
    devices = [device for group in groups for device in group]
    repeated = sorted({device for device in devices if devices.count(device) > 1})
    if repeated:
        raise ConfigError(
            f"{path}: strategy.groups: expected each device once, found {repeated[0]} more than once"
        )


def _check_optimizer(path: Path, optimizer: OptimizerSection) -> None:
    if isinstance(optimizer, SGDSection) and optimizer.nesterov and optimizer.momentum == 0.0:
        raise ConfigError(
            f"{path}: optimizer.nesterov: expected a momentum above 0 with it, found momentum 0"
        )


def _check_train(path: Path, train: TrainSection) -> None:
    if train.address is not None and train.backend != "ray":
        raise ConfigError(
            f'{path}: train.address: only backend = "ray" has an address, found backend = '
            f'"{train.backend}"; remove one of them'
        )


def _relative_to(folder: Path, config: RunConfig) -> RunConfig:
    """*config* with the paths that it reads resolved against *folder*."""
    files = tuple(str(folder / file) for file in config.data.files)
    strategy = config.strategy
    if strategy.file is not None:
        strategy = replace(strategy, file=str(folder / strategy.file))
    return replace(config, data=replace(config.data, files=files), strategy=strategy)
