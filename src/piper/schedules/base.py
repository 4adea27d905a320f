"""What schedules are made of: steps, one order per rank, and the registry of their names."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from piper.boundary import public
from piper.directives.order import Order
from piper.directives.place import Place
from piper.errors import ScheduleError
from piper.ir.dag import Pass
from piper.ir.select import COMM, PASS
from piper.limits import MAX_CELLS
from piper.pausing import collector_paused
from piper.registry import Registry
from piper.schedules.placements import Placement


class Step(NamedTuple):
    """One stage's work on one microbatch: forward, backward, or one half of a split backward."""

    pass_: Pass
    stage: int
    microbatch: int


def forward(stage: int, microbatch: int) -> Step:
    """The forward of *stage* on *microbatch*."""
    return Step(Pass.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Step:
    """The backward of *stage* on *microbatch*."""
    return Step(Pass.BACKWARD, stage, microbatch)


def backward_input(stage: int, microbatch: int) -> Step:
    """The half of that backward which makes the gradient for the stage before."""
    return Step(Pass.BACKWARD_INPUT, stage, microbatch)


def backward_weight(stage: int, microbatch: int) -> Step:
    """The half of that backward which makes the gradients of the stage's parameters."""
    return Step(Pass.BACKWARD_WEIGHT, stage, microbatch)


def warm_up_then_alternate(
    forwards: Sequence[Step], backwards: Sequence[Step], warmup: int
) -> list[Step]:
    """*warmup* forwards (at most all), then one of each in turn, then the remaining backwards.

    ``F F F B F B B B`` for four of each and a warm-up of two: what a rank does in every schedule of
    the 1F1B family.
    """
    alternating = len(forwards) - min(warmup, len(forwards))
    warm, rest = forwards[: len(forwards) - alternating], forwards[len(forwards) - alternating :]
    pairs = [step for pair in zip(rest, backwards, strict=False) for step in pair]
    return [*warm, *pairs, *backwards[alternating:]]


def order_ranks(
    ranks: Iterable[Iterable[Step]], stage_tag: str, microbatch_tag: str
) -> list[Order]:
    """One :class:`Order` per rank: the sequence in which that rank runs its steps.

    Raises :class:`~piper.errors.ScheduleError` when the two tags are equal or reserved.
    """
    return order_groups(([[step] for step in rank] for rank in ranks), stage_tag, microbatch_tag)


def order_groups(
    ranks: Iterable[Iterable[Sequence[Step]]], stage_tag: str, microbatch_tag: str
) -> list[Order]:
    """One :class:`Order` per rank: a sequence of groups; the steps of one group may overlap.

    Raises as :func:`order_ranks`.
    """
    if not isinstance(stage_tag, str) or not isinstance(microbatch_tag, str):
        raise ScheduleError(
            f"tags are texts, found stage_tag={stage_tag!r} and microbatch_tag={microbatch_tag!r}"
        )
    if len({stage_tag, microbatch_tag, PASS, COMM}) < 4:
        raise ScheduleError(
            f"stage_tag={stage_tag!r} and microbatch_tag={microbatch_tag!r} must differ from each "
            f"other and from the reserved tags {PASS} and {COMM}"
        )
    with collector_paused():  # it would walk over all that was made, again and again
        return [
            Order(
                filters=[
                    [
                        {
                            stage_tag: step.stage,
                            microbatch_tag: step.microbatch,
                            PASS: step.pass_.value,
                        }
                        for step in group
                    ]
                    for group in rank
                ]
            )
            for rank in ranks
        ]


def require_positive(schedule: str, **counts: int) -> None:
    """Raise :class:`~piper.errors.ScheduleError` unless each of *counts* is an integer of at least
    1, and there are not more cells in all than :data:`~piper.limits.MAX_CELLS`.
    """
    cells = 1
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise ScheduleError(f"{schedule}: {name} must be an integer, found {count!r}")
        if count < 1:
            raise ScheduleError(f"{schedule}: {name} must be at least 1, found {count!r:.40}")
        cells *= min(count, MAX_CELLS + 1)
        if cells > MAX_CELLS:
            given = ", ".join(f"{each}={number!r:.40}" for each, number in counts.items())
            raise ScheduleError(
                f"{schedule}: expected at most {MAX_CELLS} stages times microbatches in all, found {given}"
            )


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule as strategies and config files see it: by name, over a list of device groups.

    There are as many ranks as groups; ``placement`` puts the stages where ``function`` assumes
    them. ``num_virtual_stages`` is the number of stages divided by the number of ranks.
    """

    name: str
    placement: Placement
    function: Callable[..., list[Order]]

    def place(
        self,
        groups: Sequence[Sequence[int]],
        num_virtual_stages: int,
        num_microbatches: int,
        stage_tag: str,
        microbatch_tag: str,
    ) -> list[Place]:
        """Where the stages are."""
        return self.placement.place(
            groups, num_virtual_stages, num_microbatches, stage_tag, microbatch_tag
        )

    def order(
        self,
        num_ranks: int,
        num_virtual_stages: int,
        num_microbatches: int,
        stage_tag: str,
        microbatch_tag: str,
    ) -> list[Order]:
        """What each rank runs, in order."""
        virtual = (num_virtual_stages,) if self.placement.virtual_stages else ()
        return self.function(
            num_ranks,
            *virtual,
            num_microbatches,
            stage_tag=stage_tag,
            microbatch_tag=microbatch_tag,
        )


SCHEDULES: Registry[Schedule] = Registry("schedule", ScheduleError)
"""Every schedule by its name in config files.

An unknown name raises :class:`~piper.errors.ScheduleError` with the nearest.
"""

F = TypeVar("F", bound=Callable[..., list[Order]])


def schedule(name: str, placement: Placement) -> Callable[[F], F]:
    """Decorator: register a function as the schedule *name*.

    Its parameters are the number of ranks, the number of stages per rank if *placement* leaves that
    open, the number of microbatches, and the keywords ``stage_tag`` and ``microbatch_tag``.
    """

    def register(function: F) -> F:
        SCHEDULES.add(name, Schedule(name, placement, function))
        return public(function)

    return register
