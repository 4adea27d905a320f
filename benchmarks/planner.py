"""Apply, plan and verify time for training DAGs of about 10,000 and 100,000 nodes; goal: plan +
verify within 1 s and 10 s.

Sixteen stages under 1F1B, without and with two replicas. Processor seconds of this one thread, the
best of a few tries: what a quiet machine takes in wall time. The ratio of the largest to the
smaller says whether it is linear.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.support import machine
from tests.support.synthetic import chain

from piper import apply, plan, schedules, verify
from piper.directives.base import Directive
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.ir.dag import Dag

STAGES = 16
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Figures:
    """Sizes, and processor seconds."""

    nodes: int
    instructions: int
    apply: float
    plan: float
    verify: float

    @property
    def plan_and_verify(self) -> float:
        return self.plan + self.verify


def strategy(microbatches: int, replicas: int) -> list[Directive]:
    """A pipeline of :data:`STAGES` stages, each on *replicas* devices."""
    placed: list[Directive] = [
        Place({"PP": s}, devices=list(range(s * replicas, (s + 1) * replicas)))
        for s in range(STAGES)
    ]
    if replicas > 1:
        placed.append(Replicate({}))
    order = schedules.one_f_one_b(num_stages=STAGES, num_microbatches=microbatches)
    return [*placed, Split({}, num_microbatches=microbatches), *order]


def measure(microbatches: int, replicas: int, tries: int) -> Figures:
    """The best of *tries*."""
    directives = strategy(microbatches, replicas)
    dag: Dag = chain(STAGES, batch_size=2 * microbatches * replicas)
    applied, apply_seconds = _best(lambda: apply(dag, directives), tries)
    planned, plan_seconds = _best(lambda: plan(applied), tries)
    _, verify_seconds = _best(lambda: verify(planned), tries)
    instructions = sum(len(device.instructions) for device in planned.devices)
    return Figures(len(applied.nodes), instructions, apply_seconds, plan_seconds, verify_seconds)


def _best(work: Callable[[], T], tries: int) -> tuple[T, float]:
    best = float("inf")
    for _ in range(tries):
        gc.collect()
        began = time.process_time()
        result = work()
        best = min(best, time.process_time() - began)
    return result, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=3)
    tries = parser.parse_args().tries
    print(machine())
    for replicas in (1, 2):
        small = measure(160, replicas, tries)
        large = measure(1600, replicas, tries)
        for figures, goal in ((small, 1), (large, 10)):
            print(
                f"planner {STAGES} stages × {replicas} replicas: {figures.nodes} nodes, {figures.instructions} instructions: "
                f"apply {figures.apply:.2f} s, plan {figures.plan:.2f} s, verify {figures.verify:.2f} s; "
                f"plan + verify {figures.plan_and_verify:.2f} s (goal {goal} s)"
            )
        growth = large.plan_and_verify / small.plan_and_verify
        print(
            f"planner {STAGES} stages × {replicas} replicas: {large.nodes / small.nodes:.1f} times the nodes take "
            f"{growth:.1f} times as long",
            flush=True,
        )


if __name__ == "__main__":
    main()
