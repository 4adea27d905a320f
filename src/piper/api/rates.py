"""The factor on the learning rates of each step. It is the driver's, and sent with each step: a
schedule may depend on what training has shown so far, on every backend.
"""

import math
from collections.abc import Callable

from piper.errors import ConfigError


class Rates:
    """*schedule*, if there is one, maps the number of a step to a factor; ``factor``, at first 1,
    multiplies all of them.

    Raises :class:`ConfigError` for a schedule that is no function, or gives no number for step 0.
    """

    def __init__(self, schedule: Callable[[int], float] | None) -> None:
        if schedule is not None and not callable(schedule):
            raise ConfigError(
                "lr_schedule= is a function from the number of a step to a factor on the learning rates, such as lambda step: "
                f"min(1, (step + 1) / 100), found {type(schedule).__name__}"
            )
        self._schedule = schedule
        self._factor = 1.0
        self.at(0)

    @property
    def fixed(self) -> bool:
        """Whether there is no schedule."""
        return self._schedule is None

    @property
    def factor(self) -> float:
        """What multiplies the schedule."""
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"lr_factor is a number, found {value!r:.80}")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"lr_factor is finite and at least 0, found {value!r}")
        self._factor = float(value)

    def at(self, step: int) -> float:
        """The factor of *step*. Raises :class:`ConfigError` when the schedule fails."""
        if self._schedule is None:
            return self._factor
        try:
            scheduled = float(self._schedule(step))
        except Exception as error:
            raise ConfigError(
                f"lr_schedule= must return a factor on the learning rates for every step, failed for step {step}: {type(error).__name__}: {error}"
            ) from error
        if math.isnan(scheduled):
            raise ConfigError(
                f"lr_schedule= must return a factor on the learning rates, found NaN for step {step}"
            )
        return scheduled * self._factor

    def of(self, first_step: int, count: int) -> tuple[float, ...]:
        """The factors of *count* steps."""
        return tuple(self.at(step) for step in range(first_step, first_step + count))
