"""Run random cases, and go on where the last run ended: ``python -m tests.random.fuzz 2000``.

Each thousand seeds has a file of results, a line per seed; failures are shrunk and written as
scripts. A worker process runs the cases, so that one that hangs or dies is a finding, too.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tests.random import outcome as results
from tests.random.cases import draw, to_json
from tests.random.outcome import CRASHED, HUNG, Outcome, generator, outcome, shared_captures, shrink
from tests.random.source import script

PER_FILE = 1000
GRACE = 60
"""Seconds after which a worker that does not answer is ended."""

CASES_PER_WORKER = 150


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    with shared_captures():
        while (seed := pipe.recv()) is not None:
            case = draw(seed)
            found = outcome(case)
            pipe.send(found)
            if found.failed and found.kind != HUNG:
                pipe.send(to_json(shrink(case, found, outcome)))
            elif found.failed:
                pipe.send(to_json(case))


class _Worker:
    """A process that runs cases, replaced when it is no good any more."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._done = 0

    def run(self, seed: int) -> tuple[Outcome, str]:
        """The outcome of a case, and the smallest case that fails alike."""
        if self._done >= CASES_PER_WORKER:
            self.close()
            self._start()
        self._done += 1
        self._pipe.send(seed)
        try:
            found = self._receive(results.SECONDS + GRACE)
            assert isinstance(found, Outcome)
            small = self._receive(1800) if found.failed else ""
            if found.kind == HUNG:  # its threads may be there still
                self._end()
        except TimeoutError:
            self._end()
            return Outcome(HUNG, "the process does not answer"), to_json(draw(seed))
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._start()
            return Outcome(CRASHED, f"the process died: {code}"), to_json(draw(seed))
        return found, str(small)

    def _receive(self, seconds: float) -> object:
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._start()

    def close(self) -> None:
        """Let it end by itself."""
        self._pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


def file_of(folder: Path, seed: int) -> Path:
    """Where the result of *seed* is."""
    first = seed // PER_FILE * PER_FILE
    return folder / f"{first:07d}.jsonl"


def known(folder: Path, first: int, count: int) -> Iterator[dict[str, object]]:
    """Results of these seeds that are there, the last of each."""
    found: dict[int, dict[str, object]] = {}
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if first <= entry["seed"] < first + count:
                found[entry["seed"]] = entry
    yield from found.values()


def main(arguments: list[str]) -> int:
    """Run what is not there yet; the summary; how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--folder", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--again", action="store_true", help="also seeds that failed before")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that long")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    mark, end = generator(), time.monotonic() + given.seconds
    done = {
        e["seed"]
        for e in known(given.folder, given.first, given.count)
        if e["generator"] == mark and not (given.again and e["kind"] in results.FAILURES)
    }
    worker = _Worker()
    for seed in range(given.first, given.first + given.count):
        if seed in done:
            continue
        if time.monotonic() > end:
            break
        found, small = worker.run(seed)
        entry = {"seed": seed, "generator": mark, "kind": found.kind, "reason": found.reason}
        entry |= {"group": found.group, "seconds": found.seconds}
        if found.failed:
            path = given.folder / f"{found.kind}_{seed}.py"
            title = f"Case {seed}: {found.kind}."
            from tests.random.cases import from_json

            path.write_text(script(from_json(small), title))
            path.with_suffix(".txt").write_text(f"{found.reason}\n\n{found.detail}")
            sys.stdout.write(f"{seed}: {found.kind}: {found.reason[:200]}\n  {path}\n")
            sys.stdout.flush()
        with file_of(given.folder, seed).open("a") as out:
            out.write(json.dumps(entry) + os.linesep)
    worker.close()
    entries = list(known(given.folder, given.first, given.count))
    entries = [e for e in entries if e["generator"] == mark]
    sys.stdout.write(summary(entries))
    return sum(e["kind"] in results.FAILURES for e in entries)


def summary(entries: list[dict[str, object]]) -> str:
    """The table at the end."""
    kinds = Counter(str(e["kind"]) for e in entries)
    seconds = sum(float(str(e["seconds"])) for e in entries)
    lines = [f"{len(entries)} cases in {seconds:.0f} s"]
    lines += [f"{n:7d}  {100 * n / len(entries):5.1f} %  {kind}" for kind, n in kinds.most_common()]
    reasons = Counter((str(e["kind"]), str(e["group"])) for e in entries if e["group"])
    lines += ["", *(f"{n:7d}  {kind}: {text}" for (kind, text), n in reasons.most_common(40))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
