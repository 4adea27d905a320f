"""Strategies from schedule files of ``torch.distributed.pipelining``, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from piper.boundary import public
from piper.directives.base import Directive
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.split import Split
from piper.errors import ScheduleError
from piper.ir.dag import Pass
from piper.ir.select import ANY, PASS, FilterValue
from piper.schedules.action_checks import check_actions
from piper.schedules.actions import (
    LETTERS,
    actions_of,
    check_overlap,
    format_actions,
    parse_actions,
)
from piper.schedules.base import Step, order_groups


@public
def strategy_of_actions(
    text: str, *, stage_tag: str = "PP", microbatch_tag: str = "MB"
) -> list[Directive]:
    """The strategy that a file of actions (:mod:`piper.schedules.actions`) describes; rank r is
    device r.

    Its stages' placement, the split into microbatches, and one order per rank. Communication is
    checked and left out: it follows from the directives.

    Raises :class:`~piper.errors.ScheduleError`, naming rank, row and cell: for what is no action,
    an action that is missing, there twice, or too early; a stage on two ranks; sends and receives
    that cannot be paired; a stage used while its parameters are not gathered; ranks that wait for
    each other.
    """
    rows = parse_actions(text)
    check_actions(rows)
    ranks = [[[a.step for a in group] for group in row if group[0].computes] for row in rows]
    computes = [a for row in rows for a in actions_of(row) if a.computes]
    rank_of = {a.stage: a.cell.rank for a in computes}
    count = 1 + max(a.microbatch for a in computes)
    return [
        *(Place({stage_tag: stage}, devices=[rank_of[stage]]) for stage in sorted(rank_of)),
        Split({}, dim_name=microbatch_tag, num_microbatches=count),
        *order_groups((rank for rank in ranks if rank), stage_tag, microbatch_tag),
    ]


@public
def actions_of_strategy(strategy: Sequence[Directive], *, stage_tag: str = "PP") -> str:
    """The file of actions of *strategy*'s orders: a row per device group, in order of first
    devices.

    Without any ``Place`` each order is a row. Microbatches are those of the ``Split``. All other
    directives are left out: such a file does not speak of them.

    Raises :class:`~piper.errors.ScheduleError`, naming the directive and the filter, for what such
    a file cannot say: filters of more than one chunk or of communication, groups other than a
    forward and a backward, two orders for one rank, a stage on two ranks; and for orders that leave
    chunks out.
    """
    if not any(isinstance(directive, Order) for directive in strategy):
        raise ScheduleError("the strategy has no Order, so there is no schedule to write")
    tags = {d.dim_name for d in strategy if isinstance(d, Split)} or {"MB"}
    if len(tags) > 1:
        raise ScheduleError(f"a file of actions has one split, found {', '.join(sorted(tags))}")
    (microbatch_tag,) = tags
    rows = _Rows([d for d in strategy if isinstance(d, Place)], stage_tag, microbatch_tag)
    for number, directive in enumerate(strategy):
        if isinstance(directive, Order):
            for position, group in enumerate(directive.filters):
                rows.add(number, position, group)
    text = format_actions(groups for _, groups in sorted(rows.groups.items()))
    check_actions(parse_actions(text))
    return text


_Row: TypeAlias = tuple[int, ...]
"""A device group; the number of an order where nothing is placed."""


@dataclass(slots=True)
class _Rows:
    """The rows of a file, group by group."""

    places: Sequence[Place]
    stage_tag: str
    microbatch_tag: str
    groups: dict[_Row, list[list[Step]]] = field(default_factory=dict)
    order_of: dict[_Row, int] = field(default_factory=dict)
    row_of: dict[int, _Row] = field(default_factory=dict)

    def add(self, number: int, position: int, group: Sequence[Mapping[str, FilterValue]]) -> None:
        """Add a group of the order that is directive *number* to the rows that it speaks of."""
        here: dict[_Row, list[Step]] = {}
        for filter_ in group:
            where = f"directive {number}, filters[{position}], {dict(filter_)}"
            step = self._step(filter_, where)
            here.setdefault(self._row(step, number, where), []).append(step)
        for row, steps in here.items():
            if len(steps) > 1:
                kinds = [LETTERS[step.pass_] for step in steps]
                check_overlap(kinds, f"directive {number}, filters[{position}]")
            self.groups.setdefault(row, []).append(steps)

    def _step(self, filter_: Mapping[str, FilterValue], where: str) -> Step:
        tags = (self.stage_tag, self.microbatch_tag, PASS)
        stage, microbatch, pass_ = (filter_.get(tag) for tag in tags)
        if (
            len(filter_) != len(tags)
            or not (isinstance(stage, int) and isinstance(microbatch, int))
            or pass_ not in list(LETTERS)
        ):
            example = {self.stage_tag: 0, self.microbatch_tag: 3, PASS: "F"}
            raise ScheduleError(
                f"{where}: an action is one chunk, such as {example}, its pass one of {', '.join(LETTERS)}"
            )
        return Step(Pass(str(pass_)), stage, microbatch)

    def _row(self, step: Step, number: int, where: str) -> _Row:
        row = self._placed(step, where) if self.places else (number,)
        first = self.row_of.setdefault(step.stage, row)
        if first != row:
            raise ScheduleError(
                f"{where}: stage {step.stage} is on {list(first)} and on {list(row)}; a file of actions "
                "has each stage on one rank"
            )
        if self.order_of.setdefault(row, number) != number:
            raise ScheduleError(
                f"{where}: directive {self.order_of[row]} orders that rank already; a file of actions "
                "has one row per rank"
            )
        return row

    def _placed(self, step: Step, where: str) -> _Row:
        """The group of the stage; a ``Place`` of a part of it (by another tag) does not count."""
        tags = {self.stage_tag: step.stage, self.microbatch_tag: step.microbatch}
        for place in self.places:
            if place.filter.keys() <= tags.keys() and all(
                _matches(value, tags[tag]) for tag, value in place.filter.items()
            ):
                return tuple(place.devices)
        raise ScheduleError(f"{where}: no Place says where stage {step.stage} is")


def _matches(value: FilterValue, index: int) -> bool:
    if isinstance(value, (list, tuple)):
        return index in value or ANY in value
    return value in (index, ANY)
