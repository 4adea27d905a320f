"""Equal input gives equal bytes, in any process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import hashlib
from piper.directives.split import Split
from piper.directives.replicate import Replicate
from piper.directives.strategy import apply
from piper.plan.codec import encode_plan
from piper.planner import plan
from piper.schedules.interleaved import interleaved_one_f_one_b
from piper.schedules.placements import looped, two_way
from tests.support.synthetic import chain

everything = dict.fromkeys(("tied", "skip", "multi", "buffer", "weighted", "whole"), True)
cases = [
    (chain(4, **everything), [
        Replicate({}, bucket_size=1e-4, replicated_buffers="mean"),
        *looped([[0, 1], [2, 3]], 2),
        Split({}, num_microbatches=4),
        *interleaved_one_f_one_b(2, 2, 4),
    ]),
    (chain(3, tied=True, weighted=True, detached=True), [
        Split({}, num_microbatches=4), *two_way([[0], [1], [2]], 4),
    ]),
]
for dag, strategy in cases:
    for name, data in encode_plan(plan(apply(dag, strategy))).items():
        print(name, len(data), hashlib.sha256(data).hexdigest())
"""


def run(seed):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plan_files_do_not_depend_on_the_hash_seed():
    first = run("1")
    assert len(first.splitlines()) == (1 + 4) + (1 + 3)
    assert run("2") == first
    assert run("3") == first
