"""The scale of the loss over the steps of a run."""

import math
from collections.abc import Mapping

from piper.capture.precision import LossScale
from piper.errors import StateError

_FIELDS = ("scale", "good_steps")


class LossScaler:
    """The present scale, and how it changes. One for the whole run: every device is told the scale
    of a step, and the driver adjusts it once the step's norm is known.

    ``scale`` is that of the next step, ``good_steps`` how many steps in a row have updated since it
    last changed.
    """

    def __init__(self, policy: LossScale) -> None:
        self.policy = policy
        self.scale = float(policy.init)
        self.good_steps = 0

    def update(self, *, skipped: bool) -> None:
        """After a step that was to update: lower the scale if that was *skipped*, raise it after
        enough that were not.
        """
        if skipped:
            self.scale, self.good_steps = self.scale * self.policy.backoff, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.policy.growth_interval:
            grown = self.scale * self.policy.growth
            self.scale, self.good_steps = grown if math.isfinite(grown) else self.scale, 0

    def state_dict(self) -> dict[str, float]:
        """What to save, to go on from here."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises :class:`StateError` for anything else.
        """
        if set(state) != set(_FIELDS):
            raise StateError(
                f"the state of a loss scaler has the entries {', '.join(_FIELDS)}, found {', '.join(sorted(state)) or 'none'}"
            )
        scale, good_steps = float(state["scale"]), state["good_steps"]
        if (
            not (math.isfinite(scale) and scale > 0)
            or good_steps < 0
            or good_steps != int(good_steps)
        ):
            raise StateError(
                f"the state of a loss scaler is a positive scale and a number of steps, found {dict(state)}"
            )
        self.scale, self.good_steps = scale, int(good_steps)


def is_skipped(grad_norm: float | None) -> bool:
    """Whether a step under a scaled loss updates nothing: every device decides by the norm of all
    gradients, which all share.
    """
    return grad_norm is not None and not math.isfinite(grad_norm)
