"""The trial: one microbatch in plain PyTorch before a model is captured, and after it next to the
graph.

``rows`` says how large a microbatch will be, ``eager`` runs one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from piper.api.programs import Programs
from piper.api.trial.eager import EagerModel, EagerRun, eager_model, run_microbatch
from piper.api.trial.untouched import untouched
from piper.errors import CaptureError, FilterError
from piper.runtime.batch import Batch

__all__ = ["EagerRun", "Trial"]


class Trial:
    """The trial of the model of *programs* on a global *batch*."""

    def __init__(self, programs: Programs, batch: Batch, seed: int) -> None:
        self._programs, self._batch, self._seed = programs, batch, seed
        self._done = False

    def before_capture(self) -> EagerRun | None:
        """Run the first microbatch in plain PyTorch; ``None`` where the model has no values.

        Raises :class:`CaptureError` for what fails there.
        """
        self._done = True
        eager = self._eager()
        if eager is None:
            return None
        with untouched(eager.model):
            return run_microbatch(eager, self._programs.strategy)

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

    def _eager(self) -> EagerModel | None:
        p = self._programs
        return eager_model(p.model, p.loss_fn, self._batch, p.batch_dims, self._seed, p.precision)
