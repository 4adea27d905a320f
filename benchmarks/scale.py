"""Plan, verify and simulate a step on thousands of devices: 16 stages × 256 replicas, ZeRO-3, 256
microbatches under 1F1B; of opaque dense stages, and of a mixture of experts (``--experts``) that
groups of 8 of the replicas share.

The plan is folded: replicas that do the same are planned, verified and simulated once. Processor
seconds of this one thread, and the most memory that the process has had by then.
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from benchmarks.support import machine
from tests.support.synthetic import chain

from piper import Place, Replicate, Shard, Split, apply, plan, schedules, simulate, verify
from piper.capture import capture
from piper.directives.base import Directive
from piper.ir.dag import Dag
from piper.models import MoE, MoEConfig, moe_loss

T = TypeVar("T")


def strategy(
    stages: int, replicas: int, microbatches: int, expert_parallel: int = 1
) -> list[Directive]:
    """Stage s on its own group of devices, parameters sharded within it; experts shared by
    *expert_parallel* of its devices.
    """
    groups = [list(range(s * replicas, (s + 1) * replicas)) for s in range(stages)]
    starts = range(0, stages * replicas, expert_parallel)
    shared = [list(range(first, first + expert_parallel)) for first in starts]
    return [
        *(Place({"PP": s}, devices=group) for s, group in enumerate(groups)),
        *([Shard({"EP": "*"}, devices=shared)] if expert_parallel > 1 else []),
        Replicate({}, shard_params=True),
        Split({}, num_microbatches=microbatches),
        *schedules.one_f_one_b(num_stages=stages, num_microbatches=microbatches),
    ]


def mixture(stages: int, batch_size: int) -> Dag:
    """A captured decoder with a mixture of eight experts in each stage, dropless."""
    config = MoEConfig(num_layers=stages, num_stages=stages, num_heads=2, width=64)
    ids = torch.zeros((4, 16), dtype=torch.int64)
    return replace(capture(MoE(config), moe_loss, (ids, ids)), batch_size=batch_size)


def timed(what: str, work: Callable[[], T]) -> T:
    """The result, after a line about what it took."""
    began, cpu = time.perf_counter(), time.process_time()
    result = work()
    taken, used = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"scale {what:8} {used:7.1f} s of processor, {taken:7.1f} s, peak {peak:6.0f} MiB",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument(
        "--experts", type=int, default=1, metavar="N", help="share experts among N replicas"
    )
    options = parser.parse_args()
    print(machine())
    stages, replicas, microbatches = options.stages, options.replicas, options.microbatches
    rows = 2 * replicas * microbatches
    dag = chain(stages, batch_size=rows) if options.experts == 1 else mixture(stages, rows)
    directives = strategy(stages, replicas, microbatches, options.experts)
    applied = timed("apply", lambda: apply(dag, directives))
    planned = timed("plan", lambda: plan(applied, fold=True))
    report = timed("verify", lambda: verify(planned))
    line = timed("simulate", lambda: simulate(planned, "H100"))
    print(f"scale {report}")
    print(
        f"scale {planned.num_devices} devices in {len(planned.represented())} roles; step {line.seconds * 1e3:.2f} ms, bubble {line.bubble:.1%}, "
        f"{sum(1 for d in line.devices for _ in d.boxes())} boxes"
    )


if __name__ == "__main__":
    main()
