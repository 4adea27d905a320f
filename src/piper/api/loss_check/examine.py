"""Holds the loss of rows in one piece against that of the same rows in parts."""

from dataclasses import dataclass

import torch

from piper.api.loss_check.finding import Fault, LossFinding, judged
from piper.api.loss_check.forward import are_rows_alone, forward_of, layout_of
from piper.api.loss_check.made_up import (
    Layout,
    MadeUp,
    doubled,
    has_only_tensors,
    joined,
    rows_at_once,
    shrunk,
)
from piper.api.loss_check.measured import Measured, is_repeatable, measure, without_traces
from piper.api.programs import Program, Programs
from piper.api.rows import Rows
from piper.api.trial import EagerRun
from piper.api.trial.untouched import untouched
from piper.boundary import warn
from piper.runtime.batch import Batch, flatten


def warn_unless_mean(
    programs: Programs, program: Program, batch: Batch, run: EagerRun | None
) -> None:
    """One :class:`PiperWarning` if :func:`examine_loss` finds something."""
    finding = examine_loss(programs, program, batch, run)
    if finding is not None:
        warn(str(finding))


def examine_loss(
    programs: Programs, program: Program, batch: Batch, run: EagerRun | None
) -> LossFinding | None:
    """What is wrong with averaging the loss over microbatches, ``None`` for nothing that was seen.

    The loss function is given outputs that are made up from those of *run*, one microbatch, and the
    targets of *batch*; where the model computes the loss, two microbatches go through it. Not seen:
    what the example batch does not show (a mean over tokens of which it ignores none), a loss that
    draws random numbers or counts its calls, and what depends on outputs that the model makes of
    the whole batch, which is no matter of the loss.
    """
    size = program.plan.microbatch_size
    parts = program.captured.dag.batch_size // size
    if run is None or run.rows != size or parts < 2:
        return None
    rows = Rows(program.captured.dag.batch)
    with untouched(programs.model):
        examined = _Examined(programs, batch, run, rows, size, parts)
        if programs.own_loss or not has_only_tensors(run.outputs):
            return examined.by_the_model()
        return examined.by_outputs()


@dataclass(frozen=True, slots=True)
class _Examined:
    programs: Programs
    batch: Batch
    run: EagerRun
    rows: Rows
    size: int
    count: int

    def by_outputs(self) -> LossFinding | None:
        """On made-up outputs. The model is asked how its outputs grow only if they seem to show
        something, or the loss function does not take them.
        """
        guess = Layout.guessed(self.run.outputs, self.size)
        finding, failed = self._tried(guess)
        if finding is None and not failed:
            return None
        try:
            layout = self._true_layout()
        except Exception:  # noqa: BLE001 (whatever a model's own code raises: it takes no such rows)
            layout = None
        if layout is not None:
            return self._tried(layout)[0]
        if guess.is_plain(self.run.outputs, self.size):
            return finding
        return self.by_the_model()

    def _tried(self, layout: Layout) -> tuple[LossFinding | None, bool]:
        """The finding, in float64 if the loss function takes that, and whether it takes nothing."""
        for double in (True, False):
            try:
                return self._compared(layout, double=double), False
            except Exception:  # noqa: BLE001, S112 (whatever a loss function raises for what it does not take)
                continue
        return None, True

    def _compared(self, layout: Layout, *, double: bool) -> LossFinding | None:
        run = self.run
        loss_fn = without_traces(self.programs.loss_fn)
        count, size = rows_at_once(run.outputs, layout, self.size, self.count)
        indices = [torch.arange(k * self.size, k * self.size + size) for k in range(count)]
        batches = [self.rows.take(self.batch, index) for index in indices]
        source = MadeUp(run.outputs, layout, self.size, size, run.batch)
        made = [source.part(k, count, part) for k, part in enumerate(batches)]
        together = self.rows.take(self.batch, torch.cat(indices))
        form = doubled if double else _as_it_is
        targets, outputs = form(together[1]), form(joined(made, layout))
        whole = measure(loss_fn, outputs, targets)
        if not is_repeatable(loss_fn, outputs, targets):
            return None
        parts = [measure(loss_fn, form(o), form(b[1])) for o, b in zip(made, batches, strict=True)]
        finding = judged(whole, parts, whole.tolerance)
        if finding is not None or whole.weight is None or _adds_up(whole, parts):
            return finding
        turned = joined(made[1:] + made[:1], layout)
        others = [measure(loss_fn, form(tree), targets) for tree in (turned, shrunk(outputs))]
        if all(abs((m.weight or 0.0) - whole.weight) <= _ulps(whole) for m in others):
            return None  # says nothing of the outputs
        return LossFinding(Fault.WEIGHT, whole.value, whole.value, count)

    def _true_layout(self) -> Layout | None:
        """How the model's outputs grow; ``None`` where rows cannot be told apart."""
        forward = forward_of(self.programs.model)
        one, other, both = (forward(b) for b in self._two(0, 1))
        layout = layout_of((one, other), both)
        if layout is None:
            return None
        plain = layout.is_plain(one, self.size)
        same = layout_of((self.run.outputs, self.run.outputs), both) == layout
        return layout if same and (plain or are_rows_alone((one, other), both, layout)) else None

    def by_the_model(self) -> LossFinding | None:
        """On two microbatches that go through the model, of those whose labels differ most."""
        loss_fn, forward = without_traces(self.programs.loss_fn), forward_of(self.programs.model)
        batches = self._two(*self._most_different())
        try:
            outputs = [forward(b) for b in batches]
            losses = [measure(loss_fn, o, b[1]) for o, b in zip(outputs, batches, strict=True)]
        except Exception:  # noqa: BLE001 (evaluation mode may ask for other inputs, or give no loss)
            return None
        outputs_of = outputs[:2], outputs[2]
        layout = layout_of(*outputs_of)
        if layout is None or not are_rows_alone(*outputs_of, layout, ordered=False):
            return None
        if not is_repeatable(loss_fn, outputs[2], batches[2][1]):
            return None
        whole, own = losses[2], self.programs.own_loss
        return judged(whole, losses[:2], whole.tolerance, own=own)

    def _two(self, first: int, second: int) -> tuple[Batch, Batch, Batch]:
        """Two microbatches, and both in one piece."""
        a, b = (torch.arange(k * self.size, (k + 1) * self.size) for k in (first, second))
        one, other, both = (self.rows.take(self.batch, i) for i in (a, b, torch.cat([a, b])))
        return one, other, both

    def _most_different(self) -> tuple[int, int]:
        """The microbatches with the fewest and the most labels that are not ignored (negative)."""
        counts = torch.zeros(self.count)
        for name, leaf in flatten(self.batch).items():
            split = any(known.name == name and known.batch_dim == 0 for known in self.rows.leaves)
            if split and isinstance(leaf, torch.Tensor) and _is_signed(leaf):
                counts += (leaf >= 0).reshape(self.count, -1).sum(1)
        least, most = int(counts.argmin()), int(counts.argmax())
        return (least, most) if least != most else (0, 1)


def _is_signed(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _as_it_is(tree: object) -> object:
    return tree


def _adds_up(whole: Measured, parts: list[Measured]) -> bool:
    weights = sum(m.weight or 0.0 for m in parts)
    return abs((whole.weight or 0.0) - weights) <= _ulps(whole)


def _ulps(whole: Measured) -> float:
    return whole.tolerance * abs(whole.weight or 0.0)
