"""How many harmful mutations of plans the verifier catches.

    python -m benchmarks.mutation [--mutations 640] [--seed 0] [--timeout 0.7]

Each mutation damages the plan of one of the cases of ``tests/verify``. It is harmful if two
training steps of it hang, crash, leave a value behind, or differ in any loss, parameter copy or
buffer from the same steps in one process (float64, SGD with momentum): on the in-process backend,
or under an adversary that lets each stream of each device run at a random speed (a missing wait is
harmless on a CPU, which computes in issue order, and harmful on an accelerator).
"""

import argparse
import time
from collections import Counter

import torch
from tests.verify.captured import trainings
from tests.verify.execution import FailedError, differs, harm, in_process, reference
from tests.verify.mutations import Mutator
from tests.verify.plans import make

from piper.verify import find_problems

SCHEDULES = {True: 6, False: 40}
"""Adversarial schedules to try, by whether the verifier found a problem: what it accepts is tried
harder.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=float, default=0.7, help="seconds after which a run hangs"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for name, case in trainings().items():
        training, strategy = case()
        plan = make(training.dag, strategy)
        cases[name] = (training, plan, reference(training, plan))
    count: Counter[str] = Counter()
    found_by: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    began = time.perf_counter()
    for number in range(options.mutations):
        name = list(cases)[number % len(cases)]
        training, plan, expected = cases[name]
        mutation = Mutator(plan, options.seed * 1_000_003 + number).mutate()
        problems = find_problems(mutation.plan)
        on_adversary = harm(mutation.plan, training, expected, schedules=SCHEDULES[bool(problems)])
        # On a busy machine a run may only seem to hang: what was accepted gets all the time that it
        # needs.
        timeout = options.timeout if problems else 60.0
        try:
            in_backend = differs(in_process(mutation.plan, training, timeout=timeout), expected)
        except FailedError as failure:
            in_backend = str(failure)
        harmful = on_adversary or in_backend
        count["harmful"] += harmful is not None
        count["harmful on the in-process backend"] += in_backend is not None
        count["harmful under the adversary only"] += in_backend is None and harmful is not None
        count["harmful and caught"] += harmful is not None and bool(problems)
        count["harmless and refused"] += harmful is None and bool(problems)
        count["harmless and accepted"] += harmful is None and not problems
        if harmful:
            kinds[mutation.kind] += 1
            found_by.update({problem.check for problem in problems})
            if not problems:
                print(f"MISSED {name}: {mutation.kind}: {mutation.text}: {harmful}")
    print(
        f"{options.mutations} mutations of {len(cases)} plans, {time.perf_counter() - began:.0f} s"
    )
    for what, n in count.items():
        print(f"  {n:5d}  {what}")
    share = count["harmful and caught"] / max(1, count["harmful"])
    print(f"  caught: {share:.2%} of the harmful ones")
    print("found by (a mutation may be found by several checks):")
    for check, n in found_by.most_common():
        print(f"  {n:5d}  {check}")
    print("harmful ones by kind: " + ", ".join(f"{k} {n}" for k, n in kinds.most_common()))


if __name__ == "__main__":
    main()
