"""The TOML file of a training run, checked whole before anything starts.

Sections: ``[model]``, ``[data]``, ``[strategy]``, ``[optimizer]``, ``[train]``, ``[memory]``. Only
the strategy has no default. Paths in ``data.files`` and ``strategy.file`` are relative to the
file's own folder, ``train.out_dir`` and ``train.resume`` to the current one.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from piper.api.strategies import stages_per_group
from piper.errors import ConfigError, PiperError
from piper.limits import MAX_CONFIG, MAX_DEPTH, MAX_NUMBER
from piper.models.transformer import TransformerConfig
from piper.pausing import collector_paused
from piper.reading import read_file
from piper.training.data import VOCAB_SIZE, TextBatches
from piper.training.messages import explain
from piper.training.sections import (
    AdamWSection,
    DataSection,
    MemorySection,
    OptimizerSection,
    SGDSection,
    StrategySection,
    TrainSection,
    TransformerSection,
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
        per_group = stages_per_group(strategy.schedule, strategy.num_virtual_stages)
        return per_group * len(strategy.groups)

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
    data = read_file(
        path, f"{path}: expected a TOML configuration file", ConfigError, limit=MAX_CONFIG
    )
    try:
        raw = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except (RecursionError, ValueError) as error:  # Python reads no numbers of thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    _check_finite(path, "", raw)
    config = _convert(path, raw)
    _check_strategy(path, config.strategy)
    _check_optimizer(path, config.optimizer)
    _check_train(path, config.train)
    config = _relative_to(path.parent, config)
    with collector_paused():
        _check_values(path, config)
    _check_stages(path, config)
    return config


def _check_finite(path: Path, field: str, value: object) -> None:
    """No number of a run may be ``inf`` or ``nan``, though TOML has both, or of more than 64 bits;
    nothing is nested deeply.
    """
    waiting = [(field, value, 0)]
    while waiting:
        place, each, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ConfigError(
                f"{path}: {place:.80}: expected values nested at most {MAX_DEPTH} deep"
            )
        if isinstance(each, float) and not math.isfinite(each):
            raise ConfigError(f"{path}: {place}: expected a finite number, found {each}")
        if isinstance(each, int) and abs(each) > MAX_NUMBER:
            raise ConfigError(f"{path}: {place}: expected a number of 64 bits")
        if isinstance(each, dict):
            for name, item in each.items():
                waiting.append((f"{place}.{name}" if place else str(name), item, depth + 1))
        if isinstance(each, list):
            for index, item in enumerate(each):
                waiting.append((f"{place}[{index}]", item, depth + 1))


def _convert(path: Path, raw: dict[str, object]) -> RunConfig:
    """*raw* as a ``RunConfig``; errors name *path* and the field."""
    optimizer = raw.get("optimizer")
    if isinstance(optimizer, dict):
        raw = {**raw, "optimizer": {"name": "adamw", **optimizer}}
    try:
        return msgspec.convert(raw, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {explain(str(error), raw, RunConfig)}") from error


def _check_values(path: Path, config: RunConfig) -> None:
    """What the sections stand for must exist: errors name the section."""
    checks: tuple[tuple[str, Callable[[], object]], ...] = (
        ("[memory]", config.memory.limits),
        ("train.precision", config.train.policy),
        ("[strategy]", config.strategy.directives),
        ("[model]", config.transformer),
    )
    for place, check in checks:
        try:
            check()
        except PiperError as error:
            raise ConfigError(f"{path}: {place}: {error}") from error


def _check_stages(path: Path, config: RunConfig) -> None:
    """A model whose number of stages is given must have those that the schedule places."""
    strategy, found = config.strategy, config.model.num_stages
    if found is None or strategy.schedule is None or strategy.groups is None:
        return
    per_group = stages_per_group(strategy.schedule, strategy.num_virtual_stages)
    expected = per_group * len(strategy.groups)
    if found != expected:
        raise ConfigError(
            f"{path}: model.num_stages: expected {expected}, {per_group} for each of the "
            f"{len(strategy.groups)} groups of the strategy, found {found}; leave it out, or change the groups"
        )


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
    repeated = sorted(device for device, times in Counter(devices).items() if times > 1)
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
