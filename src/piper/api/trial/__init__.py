"""The trial: one microbatch in plain PyTorch before a model is captured, and after it next to the
graph.

``rows`` says how large a microbatch will be, ``eager`` runs one, ``state`` looks at what tracing
would freeze, ``reproduce`` repeats the run and names what makes its result another one, ``lines``
finds the line.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from piper.api.programs import Program, Programs
from piper.api.trial.eager import EagerModel, EagerRun, eager_model, first_microbatch
from piper.api.trial.graph import GraphCheck
from piper.api.trial.modes import warn_of_evaluation_mode
from piper.api.trial.parting import first_parting
from piper.api.trial.reproduce import Reproduction, line_of_tensor
from piper.api.trial.rows import likely_rows
from piper.api.trial.state import State, Watch
from piper.api.trial.untouched import untouched
from piper.boundary import warn
from piper.errors import CaptureError, FilterError
from piper.runtime.batch import Batch

__all__ = ["EagerRun", "Trial", "warn_of_evaluation_mode"]

LOGGER = logging.getLogger("piper.trial")
"""Says at level DEBUG how long each part took."""

_ALONE = threading.RLock()
"""The random states of the process are looked at and put back: one trial at a time."""


class Trial:
    """The trial of the model of *programs* on a global *batch*."""

    def __init__(self, programs: Programs, batch: Batch, seed: int) -> None:
        self._programs, self._batch, self._seed = programs, batch, seed
        self._done = False

    def before_capture(self) -> EagerRun | None:
        """Run the first microbatch in plain PyTorch, twice; ``None`` where the model has no values.
        It costs two steps of a microbatch (more only for a model that draws random numbers outside
        torch, or that is refused).

        Raises :class:`CaptureError` for what fails there, a loss that is not finite, and a result
        that is another one the second time. Warns of attributes that change in every run though
        nothing depends on them yet, and of random numbers outside torch on which nothing depends.
        """
        self._done = True
        eager = self._eager()
        if eager is None:
            return None
        with _observed(eager, "two runs of a microbatch in plain PyTorch") as (watch, before):
            first, run = first_microbatch(eager, self._programs.strategy, before.restore)
            again = Reproduction(run, watch)
            again.require_unwritten(first, before, eager.model)
            found = again.prove(first, before)
        if found.changing:
            warn(
                f"the forward changes {', '.join(found.changing)} in every call. The captured graph keeps what it was at capture; nothing depended "
                "on it in two runs, but what does in a later call (a threshold, a schedule) would be wrong. Make it a buffer or an input of the batch"
            )
        if found.drawn:
            warn(
                f"the forward draws random numbers from {', '.join(found.drawn)}. Whatever depends on them would be frozen; in several runs nothing "
                "did. Draw with torch instead"
            )
        return first

    def after_capture(self, program: Program) -> None:
        """Run the first microbatch of *program*'s graph on one device and in plain PyTorch, and
        compare. It costs a step of each.

        Raises :class:`CaptureError` naming what differs by more than rounding and where the two
        part, or the buffer and the line that writes it in a way that tracing does not follow.
        """
        eager = self._eager()
        if eager is None:
            return
        with _observed(eager, "a microbatch of the graph next to plain PyTorch"):
            self._compare(GraphCheck(self._programs, program, self._batch, self._seed), eager)

    def _compare(self, check: GraphCheck, eager: EagerModel) -> None:
        mismatch = check.compare()
        if mismatch is None:
            return
        run = partial(eager.run, 0, check.dag.batch_size)
        if mismatch.only_buffers:
            name = max(mismatch.buffers, key=lambda n: mismatch.buffers[n])
            raise CaptureError(
                f"{line_of_tensor(run, eager.model, name)}the forward writes buffer {name!r} in a way that tracing does not follow (.data =, "
                "swap_tensors, numpy, exchanging two buffers): it would keep another value than in plain PyTorch. Write it in place: "
                "self.buffer.copy_(new)"
            )
        parting = first_parting(check, self._seed, run)
        found, expected = mismatch.found.loss, mismatch.expected.loss
        raise CaptureError(
            f"the captured graph does not compute what the model computes: loss {found!r} against {expected!r} in plain PyTorch, which "
            f"computes the same twice; {parting or 'the forwards make the same, so it is the backward'}. Largest relative errors (allowed "
            f"{mismatch.allowed:.0e}):\n{mismatch.table()}\n"
            "If the model asks whether it is being traced or compiled, or computes with detours around autograd, write it plainly; else this is a "
            "bug of piper. verify_capture=False skips this check"
        )

    def rehearse(self, batch: Batch) -> None:
        """Run a microbatch of another *batch* in plain PyTorch, once: what fails there (a sequence
        longer than a table) is said with the user's line, before it is captured.

        Raises :class:`CaptureError`.
        """
        eager = self._eager(batch)
        if eager is None:
            return
        size = 1 if eager.batch.size is None else eager.batch.size
        with _observed(eager, "a microbatch of another shape"):
            eager.run(0, likely_rows(self._programs.strategy, size))

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Around the capture: if that fails, and nothing was run before, see whether plain PyTorch
        is to blame.
        """
        try:
            yield
        except (CaptureError, FilterError):
            if not self._done:
                self.before_capture()
            raise

    def _eager(self, batch: Batch | None = None) -> EagerModel | None:
        p = self._programs
        given = self._batch if batch is None else batch
        return eager_model(p.model, p.loss_fn, given, p.batch_dims, self._seed, p.precision)


@contextmanager
def _observed(eager: EagerModel, what: str) -> Iterator[tuple[Watch, State]]:
    """What looks at the state of the model, and how it was before; afterwards it is so again."""
    begin = time.perf_counter()
    with _ALONE, untouched(eager.model):
        watch = Watch(eager.model, eager.loss_fn)
        before = watch.look()
        try:
            yield watch, before
        finally:
            before.restore()
    LOGGER.debug("%s: %.3f s", what, time.perf_counter() - begin)
