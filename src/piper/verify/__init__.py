"""The verifier: whether a plan does what its training DAG says, and comes to an end.

Each check is one file, proves one invariant of *every* execution of the plan, and relies only on
what instructions say about themselves (reads, writes, frees, rendezvous, stream, event).
"""

from collections.abc import Collection, Iterator
from itertools import islice

from piper.boundary import public
from piper.errors import VerificationError, expect
from piper.pausing import collector_paused
from piper.plan.codec import wrong_type
from piper.plan.model import Plan
from piper.verify.contributions import check_contributions
from piper.verify.deadlock import Execution, check_deadlock
from piper.verify.events import check_events
from piper.verify.fidelity import check_fidelity
from piper.verify.lifetime import check_lifetime
from piper.verify.matching import check_matching
from piper.verify.ownership import check_ownership
from piper.verify.races import check_races
from piper.verify.report import Report
from piper.verify.structure import check_structure
from piper.verify.trace import Problem, Subject

__all__ = ["Problem", "Report", "find_problems", "verify"]

_SHOWN = 5  # problems of one check that an error shows; one mistake often has many consequences


@public
def verify(plan: Plan, *, allow_operators: Collection[str] = ()) -> Report:
    """Prove *plan* correct, or raise :class:`VerificationError` saying what is wrong and where.

    What a pass means: on every device each node of ``plan.dag`` runs exactly once on the values it
    names; messages and collectives pair up; the plan ends whatever the timing; no two accesses of a
    value race on any stream; no value is used before it exists or after its free, none is left
    over; every parameter copy is updated once, by the sum of all its contributions. Chunks call only
    operators that compute tensors from tensors and numbers (:mod:`piper.ir.operators`), and those of
    other libraries that one of *allow_operators*, shell-style patterns such as ``mylib::*``, names.
    Time is linear in the number of instructions.
    """
    expect(plan, Plan, "verify", "piper.plan makes one of a training DAG")
    with collector_paused():
        subject, problems = _examine_safely(plan, allow_operators)
    if problems or subject is None:
        raise VerificationError(_message(problems))
    return Report.of(subject)


@public
def find_problems(plan: Plan, *, allow_operators: Collection[str] = ()) -> list[Problem]:
    """The problems that :func:`verify` would raise, a few per check; empty for a correct plan."""
    return _examine_safely(plan, allow_operators)[1]


def _examine_safely(plan: Plan, allowed: Collection[str]) -> tuple[Subject | None, list[Problem]]:
    """The checks take a plan's types for granted; where one fails, a value of another type, which no
    file can hold but Python code can make, is looked for, and it is the problem.
    """
    try:
        return _examine(plan, allowed)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        try:
            wrong = wrong_type(plan)
        except (TypeError, ValueError, RecursionError) as other:
            wrong = str(other)
        if wrong is None:
            raise  # ours
        return None, [Problem("types", f"{wrong} ({type(error).__name__}: {error})")]


def _examine(plan: Plan, allowed: Collection[str]) -> tuple[Subject, list[Problem]]:
    subject, problems = check_structure(plan, allowed)
    if problems:
        return subject, problems[:_SHOWN]
    problems = _some(check_events(subject)) + _some(check_fidelity(subject))
    problems += _some(check_lifetime(subject))
    problems += _some(check_ownership(subject))
    problems += _some(check_races(subject))
    if mismatches := _some(check_matching(subject)):
        return subject, problems + mismatches
    execution = Execution(subject)
    execution.run()
    problems += _some(check_deadlock(execution))
    if not problems:
        problems = _some(check_contributions(subject, execution.completed))
    return subject, problems


def _some(problems: Iterator[Problem]) -> list[Problem]:
    return list(islice(problems, _SHOWN))


def _message(problems: list[Problem]) -> str:
    lines = "\n".join(f"- {p.check}: {p.text}" for p in problems)
    return f"the plan is wrong and must not run ({len(problems)} problems shown):\n{lines}"
