"""Where the time of one step of one worker goes."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from piper.ops.base import Instruction
from piper.ops.wait import Wait
from piper.plan.model import Plan
from piper.runtime.interpreter import Program
from piper.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class Trace:
    """Seconds that the worker waited for communication (what it does with what arrived included),
    and lines for people: milliseconds by kind of instruction, and the longest instructions that are
    not computation, with when they began.
    """

    waited: float
    lines: tuple[str, ...]


def trace(worker: Worker, plan: Plan, step: Callable[[], object], longest: int = 12) -> Trace:
    """Run one step with a clock around every instruction."""
    program = _program(worker)
    found: list[tuple[float, float, str]] = []
    steps, closures = program._steps, program._closures  # noqa: SLF001

    def timed(closure: Callable[[], None], text: str) -> Callable[[], None]:
        def run() -> None:
            start = time.perf_counter()
            closure()
            found.append((time.perf_counter() - start, start - began, text))

        return run

    program._closures = [  # noqa: SLF001
        timed(closure, _text(plan, one.instruction))
        for closure, one in zip(closures, steps, strict=True)
    ]
    began = time.perf_counter()
    try:
        step()
    finally:
        program._closures = closures  # noqa: SLF001
    total = time.perf_counter() - began
    kinds: dict[str, float] = {}
    for took, _, text in found:
        kinds[text.split()[0]] = kinds.get(text.split()[0], 0.0) + took
    by_kind = ", ".join(f"{k} {t * 1e3:.0f}" for k, t in sorted(kinds.items(), key=lambda x: -x[1]))
    rest = sorted((f for f in found if not f[2].startswith("compute ")), reverse=True)[:longest]
    lines = [f"{total * 1e3:.0f} ms; ms by kind: {by_kind}"] + [
        f"    at {at * 1e3:6.0f} for {took * 1e3:5.1f} ms: {text}"
        for took, at, text in sorted(rest, key=lambda f: f[1])
    ]
    return Trace(kinds.get("wait", 0.0), tuple(lines))


def _program(worker: Worker) -> Program:
    program = worker._plans["train"].program  # noqa: SLF001
    assert program is not None
    return program


def _text(plan: Plan, instruction: Instruction) -> str:
    node = plan.dag.nodes.get(instruction.node)
    kind = "wait" if isinstance(instruction, Wait) else instruction.op
    return f"{kind} [{'' if node is None else node.label}] on {instruction.stream}"
