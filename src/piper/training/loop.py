"""A training run: compile, train, evaluate, save; then the same steps in one process, for
comparison.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch

from piper.api.compile import compile as compile_strategy
from piper.api.trainer import Trainer, TrainResult
from piper.models.transformer import Transformer, generate, transformer_loss
from piper.runtime.batch import Batch
from piper.runtime.checkpoint.reader import Checkpoint
from piper.training.checkpoint import (
    RunCheckpoints,
    check_folder,
    check_resumes,
    describe,
    find_checkpoint,
)
from piper.training.config import RunConfig
from piper.training.files import RunFiles
from piper.training.interrupts import Interrupts
from piper.training.metrics import (
    HeldOutRecord,
    MetricsWriter,
    Record,
    TrainRecord,
    read_metrics,
    rewrite_metrics,
)
from piper.training.model import make_model
from piper.training.reference import reference_losses
from piper.training.watcher import Silent, Watcher

PROMPT_BYTES = 32
SAMPLE_BYTES = 200
SAMPLE_TEMPERATURE = 0.8


class Ending(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    TIME = "out of time"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run computed; its files are in ``out_dir``. A run that went on from a checkpoint has
    the steps before it too, if their metrics were there.

    ``reference`` holds the losses of the first steps of the same training in one process,
    ``sample`` what the model wrote after the held-out bytes ``prompt``. Both are empty when the run
    was interrupted or diverged.
    """

    ending: Ending
    out_dir: Path
    trained: tuple[TrainRecord, ...]
    held_out: tuple[HeldOutRecord, ...]
    reference: tuple[float, ...] = ()
    prompt: bytes = b""
    sample: bytes = b""

    @property
    def max_difference(self) -> float | None:
        """The largest |difference| of the loss from the reference's, over the reference's steps; a
        NaN is infinite.
        """
        count = len(self.reference)
        common = (record for record in self.trained if record.step <= count)
        found = [abs(record.loss - self.reference[record.step - 1]) for record in common]
        return max((math.inf if math.isnan(d) else d for d in found), default=None)


def train(config: RunConfig, watcher: Watcher | None = None) -> Outcome:
    """Run *config*, and write into its ``out_dir``, in place of what an earlier run wrote there:

    ``strategy.json``, ``plan/``, ``metrics.jsonl`` (a line per step and evaluation) and
    ``model.safetensors`` (under the model's own names, tied ones under each, so that
    ``load_state_dict`` takes it); checkpoints where ``checkpoint_every`` asks for them. With
    ``resume`` the run goes on from a checkpoint, under whatever strategy; its metrics up to there
    are kept.

    After a Ctrl-C the step that is under way is completed, and what there is is written. A loss that
    is no finite number ends the run, since no later one will be; the model is not written then, and
    the last checkpoint is one from before.

    Raises :class:`~piper.errors.PiperError` before any worker is started for whatever can be known
    to be wrong by then.
    """
    watcher = watcher or Silent()
    watcher.begin("reading the text")
    data = config.batches()
    example = data(0)
    held_out = list(data.held_out_batches(config.train.eval_batches))
    model = make_model(config)
    directives = config.strategy.directives()
    files = RunFiles(Path(config.train.out_dir))
    checkpoints = RunCheckpoints(files.checkpoints, config.train.keep_checkpoints, describe(config))
    resumed = _resumed(config, checkpoints)
    earlier = [] if resumed is None else _earlier_records(resumed)
    files.clear()
    checkpoints.remove_unfinished()
    rewrite_metrics(files.metrics, earlier)
    compiling = "; compiling" if config.train.compile else ""
    watcher.begin(f"capturing, planning and verifying; starting the workers{compiling}")
    with MetricsWriter(files.metrics) as metrics:
        trainer = compile_strategy(
            model,
            transformer_loss,
            directives,
            example,
            optimizer=config.optimizer.build,
            lr_schedule=config.train.warmup(),
            backend=config.train.make_backend(),
            seed=config.train.seed,
            max_grad_norm=config.train.max_grad_norm,
            memory_budget=config.memory.budget,
            receive_bytes=config.memory.receive_bytes,
            gather_bytes=config.memory.gather_bytes,
            fetch_bytes=config.memory.fetch_bytes,
            reduce_bytes=config.memory.reduce_bytes,
            precision=config.train.policy(),
            compile=config.train.compile,
        )
        with trainer, Interrupts() as interrupts:
            files.write_strategy(directives, trainer.program.plan)
            if resumed is not None:
                trainer.load(resumed.path)
            run = _Run(config, trainer, held_out, metrics, watcher, interrupts, checkpoints)
            run.remember(earlier)
            ending = run.to_the_end()
            state = trainer.state_dict()
            if ending is not Ending.DIVERGED:
                files.write_model(state)
    outcome = Outcome(
        ending=ending,
        out_dir=files.folder,
        trained=tuple(run.trained),
        held_out=tuple(run.held_out),
    )
    if ending in (Ending.INTERRUPTED, Ending.DIVERGED):
        return outcome
    model.load_state_dict(state)
    return _finished(config, outcome, model, _prompt(held_out), watcher)


def _resumed(config: RunConfig, checkpoints: RunCheckpoints) -> Checkpoint | None:
    """The checkpoint to go on from, if that is wanted.

    Raises :class:`~piper.errors.PiperError` for what is wrong with it, or with those that are
    there.
    """
    found = None
    if config.train.resume is not None:
        found = Checkpoint.open(find_checkpoint(Path(config.train.resume)))
        check_resumes(found, checkpoints.description, config)
    check_folder(checkpoints.folder, found)
    return found


def _earlier_records(resumed: Checkpoint) -> list[Record]:
    """The metrics of the run that wrote the checkpoint, up to it; none if they are not there any
    more.
    """
    metrics = RunFiles(resumed.path.parent.parent).metrics
    if not metrics.is_file():
        return []
    return [record for record in read_metrics(metrics) if record.step <= resumed.step]


class _Enough(Exception):  # noqa: N818 (no error: it ends a call to the trainer)
    """The run shall end before its last step."""


@dataclass(slots=True)
class _Run:
    """The steps and evaluations of a run, and what they found."""

    config: RunConfig
    trainer: Trainer
    batches: Sequence[Batch]
    metrics: MetricsWriter
    watcher: Watcher
    interrupts: Interrupts
    checkpoints: RunCheckpoints
    trained: list[TrainRecord] = field(default_factory=list)
    held_out: list[HeldOutRecord] = field(default_factory=list)
    deadline: float = math.inf
    diverged: bool = False

    def remember(self, records: Sequence[Record]) -> None:
        """What was found in the steps before those of this run."""
        self.trained += [record for record in records if isinstance(record, TrainRecord)]
        self.held_out += [record for record in records if isinstance(record, HeldOutRecord)]

    def to_the_end(self) -> Ending:
        """Train until the last step, the time limit, an interrupt or a loss that is no number, and
        save the last state, except after the latter.
        """
        ending = self._train()
        if ending is not Ending.DIVERGED and self.config.train.checkpoint_every is not None:
            self._save()
        return ending

    def _train(self) -> Ending:
        settings = self.config.train
        if settings.max_minutes is not None:
            self.deadline = time.monotonic() + 60 * settings.max_minutes
        data = self.config.batches()
        self.watcher.begin("training", settings.steps - self.trainer.steps_done)
        try:
            while (done := self.trainer.steps_done) < settings.steps:
                evaluation = _next_multiple(settings.eval_every, done)
                checkpoint = _next_multiple(settings.checkpoint_every, done)
                stop = min(settings.steps, evaluation, checkpoint)
                self.trainer.fit(data, stop - done, self._on_steps)
                if stop in (evaluation, settings.steps):
                    self._evaluate()
                if stop == checkpoint:
                    self._save()
                    self._heed_interrupts()
        except _Enough:
            if self.diverged:
                return Ending.DIVERGED
            return Ending.INTERRUPTED if self.interrupts.requested else self._out_of_time()
        return Ending.FINISHED

    def _out_of_time(self) -> Ending:
        try:
            self._evaluate()
        except _Enough:
            return Ending.DIVERGED if self.diverged else Ending.INTERRUPTED
        return Ending.TIME

    def _on_steps(self, results: Sequence[TrainResult]) -> None:
        for result in results:
            record = TrainRecord(
                step=result.step + 1,
                loss=result.loss,
                seconds=result.seconds,
                tokens_per_second=result.tokens_per_second,
                grad_norm=result.grad_norm,
            )
            self.metrics.write(record)
            self.trained.append(record)
            # A step that was skipped because its scaled loss was too large changed nothing.
            if not math.isfinite(result.loss) and not result.skipped:
                self.diverged = True
                raise _Enough
        seconds = sum(r.seconds for r in results)
        rate = sum(r.tokens for r in results) / seconds if seconds else math.inf
        self.watcher.advance(len(results), results[-1].loss, rate)
        late = time.monotonic() >= self.deadline
        if self.interrupts.requested or (late and results[-1].step + 1 < self.config.train.steps):
            raise _Enough

    def _save(self) -> None:
        if (path := self.checkpoints.save(self.trainer)) is not None:
            self.watcher.saved(path)

    def _evaluate(self) -> None:
        losses = [self.trainer.evaluate(*batch).loss for batch in self.batches]
        record = HeldOutRecord(step=self.trainer.steps_done, loss=sum(losses) / len(losses))
        self.metrics.write(record)
        self.held_out.append(record)
        self.watcher.evaluated(record)
        if not math.isfinite(record.loss):
            self.diverged = True
            raise _Enough
        self._heed_interrupts()

    def _heed_interrupts(self) -> None:
        if self.interrupts.requested:
            raise _Enough


def _next_multiple(of: int | None, after: int) -> int:
    """The first multiple of *of* above *after*; if there is none, more than any run has steps."""
    return sys.maxsize if of is None else after + of - after % of


def _finished(
    config: RunConfig, outcome: Outcome, model: Transformer, prompt: bytes, watcher: Watcher
) -> Outcome:
    """*outcome* with a sample of *model*'s text and the losses of the reference."""
    watcher.begin("writing a sample")
    generator = torch.Generator().manual_seed(config.train.seed)
    sample = generate(model, prompt, SAMPLE_BYTES, SAMPLE_TEMPERATURE, generator)
    done = [record.step for record in outcome.trained]
    steps = min(config.train.reference_steps, max(done, default=0))
    steps = steps if steps >= min(done, default=0) else 0
    losses: list[float] = []
    if steps:
        watcher.begin("the same in one process", steps)
        tokens, before = config.train.batch_size * config.train.seq_len, time.monotonic()
        for loss in reference_losses(config, steps):
            losses.append(loss)
            now = time.monotonic()
            watcher.advance(1, loss, tokens / max(now - before, 1e-9))
            before = now
    return replace(outcome, reference=tuple(losses), prompt=prompt, sample=sample)


def _prompt(batches: Sequence[Batch]) -> bytes:
    """The first held-out bytes."""
    inputs = batches[0][0]
    assert isinstance(inputs, torch.Tensor)
    return bytes(inputs[0, :PROMPT_BYTES].tolist())
