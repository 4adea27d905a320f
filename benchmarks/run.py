"""Run every benchmark, one process each, and print their lines: ``make bench``.

Never part of continuous integration: figures of a shared machine say little. Run it on a quiet one.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

BENCHMARKS = (
    "interpreter",
    "planner",
    "capture",
    "throughput",
    "memory",
    "data_parallel",
    "experts",
    "expert_pipelines",
    "prediction",
    "scale",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the benchmarks.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default: all")
    chosen = parser.parse_args().names or BENCHMARKS
    if unknown := sorted(set(chosen) - set(BENCHMARKS)):
        parser.error(f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    failed = []
    for name in chosen:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"],
            cwd=Path(__file__).parent.parent,
            env=environment,
            check=False,
        )
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
