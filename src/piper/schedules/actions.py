"""Actions of ``torch.distributed.pipelining``: the cells of its schedule files.

A file has a row per rank. ``0F3`` is stage 0's forward of microbatch 3; ``B`` is a backward, ``I``
and ``W`` are its input and weight half; ``(0F3;1B2)OVERLAP_F_B`` are two that overlap; an empty
cell is an idle step. Lowered schedules have communication too: ``0SEND_F3`` sends what ``0F3``
made, ``1RECV_F3`` gets what ``1F3`` reads, ``1SEND_B3`` and ``0RECV_B3`` likewise for gradients;
``0UNSHARD`` gathers the stage's parameters, ``0RESHARD`` frees them, ``0REDUCE_GRAD`` reduces its
gradients.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from piper.errors import ScheduleError, nearest
from piper.ir.dag import Pass
from piper.limits import MAX_CELLS
from piper.schedules.base import Step

PASSES = {
    "F": Pass.FORWARD,
    "B": Pass.BACKWARD,
    "I": Pass.BACKWARD_INPUT,
    "W": Pass.BACKWARD_WEIGHT,
}
LETTERS = {pass_: letter for letter, pass_ in PASSES.items()}
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAP = "OVERLAP_F_B"

_ACTION = re.compile(r"([0-9]+)([A-Z_]+)([0-9]*)")
_GROUP = re.compile(r"\(([^()]*)\)(\w*)")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a file: rank and position count from 0."""

    rank: int
    position: int
    text: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (row {self.rank + 1}), cell {self.position + 1}, {self.text!r:.80}"
        )

    def error(self, message: str) -> ScheduleError:
        """An error that says where it is."""
        return ScheduleError(f"{self}: {message}")


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does: ``kind`` is a letter of ``PASSES``, or a word. Sharding has no microbatch:
    -1.
    """

    kind: str
    stage: int
    microbatch: int
    cell: Cell

    @property
    def step(self) -> Step:
        """The chunk that a compute action runs."""
        return Step(PASSES[self.kind], self.stage, self.microbatch)

    @property
    def computes(self) -> bool:
        """Whether it is a chunk's work."""
        return self.kind in PASSES

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


Group: TypeAlias = tuple[Action, ...]
"""The actions of one cell: one, or two that overlap."""


def parse_actions(text: str) -> list[list[Group]]:
    """The groups of each rank; idle steps are left out.

    Raises :class:`~piper.errors.ScheduleError`, naming row and cell, for a cell that is no action.
    """
    rows = csv.reader(io.StringIO(text))
    try:
        return [
            [
                _group(Cell(rank, position, cell.strip()))
                for position, cell in enumerate(row)
                if cell.strip()
            ]
            for rank, row in enumerate(rows)
        ]
    except csv.Error as error:
        raise ScheduleError(
            f"row {rows.line_num}: expected cells with commas between: {error}"
        ) from error


def format_actions(ranks: Iterable[Iterable[Sequence[Step]]]) -> str:
    """The file of *ranks*, each a sequence of groups of steps."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([map(_cell, rank) for rank in ranks])
    return file.getvalue()


def _cell(group: Sequence[Step]) -> str:
    texts = [f"{step.stage}{LETTERS[step.pass_]}{step.microbatch}" for step in group]
    return texts[0] if len(texts) == 1 else f"({';'.join(texts)}){OVERLAP}"


def _group(cell: Cell) -> Group:
    if not cell.text.startswith("("):
        return (_action(cell.text, cell),)
    match = _GROUP.fullmatch(cell.text)
    if match is None or match[2] != OVERLAP:
        raise cell.error(f"expected a group like (0F3;1B2){OVERLAP}")
    group = tuple(_action(member.strip(), cell) for member in match[1].split(";"))
    check_overlap([a.kind for a in group], str(cell))
    return group


def check_overlap(kinds: Sequence[str], where: str) -> None:
    """Raise :class:`~piper.errors.ScheduleError` unless *kinds* is what a cell can overlap."""
    forwards = kinds.count("F")
    if len(kinds) != 2 or forwards != 1 or not set(kinds) <= {"F", "B", "I"}:
        raise ScheduleError(
            f"{where}: a forward may overlap a backward (B or I), found {', '.join(kinds)}"
        )


def _action(text: str, cell: Cell) -> Action:
    known = (*PASSES, *MESSAGES, *SHARDING)
    match = _ACTION.fullmatch(text)
    if match is None:
        raise cell.error(
            "expected an action: stage, kind, microbatch, such as 0F3; kinds: " + ", ".join(known)
        )
    stage, kind, microbatch = match.groups()
    if kind not in known:
        raise cell.error(f"unknown kind {kind!r}{nearest(kind, known)}; known: {', '.join(known)}")
    if (kind in SHARDING) == bool(microbatch):
        has = "no microbatch" if kind in SHARDING else "a microbatch, as in 0F3"
        raise cell.error(f"{kind} has {has}")
    for name, digits in (("stage", stage), ("microbatch", microbatch)):
        if len(digits) > len(str(MAX_CELLS)) or int(digits or 0) >= MAX_CELLS:
            raise cell.error(f"expected a {name} below {MAX_CELLS}")
    return Action(kind, int(stage), int(microbatch or -1), cell)


def actions_of(row: Iterable[Group]) -> Iterator[Action]:
    """The actions of a row one by one."""
    return (action for group in row for action in group)
