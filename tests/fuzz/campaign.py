"""Damage files and read them.

    python -m tests.fuzz.campaign [READER ...] -n 20000 [--seed 0] [--save fuzz-failures]
    python -m tests.fuzz.campaign READER --replay fuzz-failures/plan-0-123

Each file is made from its seed and its number, so that a failure can be made again. A failure is
an exception other than a ``PiperError``, more than two seconds of processor, more than 500 MB above
the process before, or damage to a checkpoint that is not refused; its files are saved.
"""

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from piper.errors import PiperError
from tests.fuzz.damage import damaged
from tests.fuzz.readers import NAMES, Reader
from tests.fuzz.readers import reader as make_reader

SECONDS = 2.0
MEBIBYTES = 500


class TooSlowError(BaseException):
    """A file took more than its time of processor."""


@dataclass
class Result:
    """How the files of one reader were answered."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0
    highest: float = 0.0


def mutated(reader: Reader, seed: int, number: int) -> dict[str, bytes]:
    """The files of case *number*."""
    rng = random.Random(f"{reader.name} {seed} {number}")
    original = rng.choice(reader.originals)
    files = dict(original)
    while files == original:
        name = rng.choice(sorted(files))
        files[name] = damaged(rng, files[name])
    return files


def run(reader: Reader, numbers: range, seed: int = 0, save: Path | None = None) -> Result:
    """Read the damaged files with these *numbers*."""
    result = Result()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "case"
        for number in numbers:
            files = mutated(reader, seed, number)
            outcome = attempt(reader, files, folder, result)
            result.outcomes[outcome.partition(":")[0]] += 1
            if outcome.startswith("FAILED"):
                result.failures.append(f"{reader.name} {seed} {number}: {outcome}")
                if save is not None:
                    write(files, save / f"{reader.name}-{seed}-{number}")
    return result


def attempt(reader: Reader, files: Mapping[str, bytes], folder: Path, result: Result) -> str:
    """How *files*, written into *folder*, were answered."""
    write(files, folder)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        with _limited():
            reader.read(folder)
        outcome = "FAILED: damage was not refused" if reader.strict else "read"
    except PiperError as error:
        outcome = type(error).__name__
    except TooSlowError:
        outcome = f"FAILED: more than {SECONDS} s of processor"
    except BaseException as error:  # noqa: BLE001 (what is looked for)
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome = (
            f"FAILED: {type(error).__name__}: {str(error)[:200]} at {where.filename}:{where.lineno}"
        )
    result.slowest = max(result.slowest, time.process_time() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result.highest = max(result.highest, grown)
    return f"FAILED: {grown:.0f} MiB" if grown > MEBIBYTES else outcome


class _limited:  # noqa: N801 (a context manager)
    """Interrupts what takes too long; what does not return to Python is found afterwards."""

    def __enter__(self) -> None:
        self._old = signal.signal(signal.SIGVTALRM, self._stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._old)

    @staticmethod
    def _stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError


def write(files: Mapping[str, bytes], folder: Path) -> None:
    """Write *files* into a new *folder*."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _wanted(names: list[str]) -> Iterator[Reader]:
    return map(make_reader, names or NAMES)


def main() -> int:
    """Run a campaign, or one case of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("readers", nargs="*", choices=(*NAMES, []))
    parser.add_argument("-n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--replay", type=Path)
    options = parser.parse_args()
    if options.replay is not None:
        next(_wanted(options.readers)).read(options.replay)
        return 0
    failed = 0
    for reader in _wanted(options.readers):
        began = time.process_time()
        result = run(
            reader, range(options.first, options.first + options.n), options.seed, options.save
        )
        failed += len(result.failures)
        print(
            f"{reader.name}: {options.n} files, {time.process_time() - began:.0f} s of processor, slowest {result.slowest:.2f} s, "
            f"highest +{result.highest:.0f} MiB, {len(result.failures)} failures; "
            + ", ".join(f"{kind} {count}" for kind, count in result.outcomes.most_common()),
            flush=True,
        )
        for failure in result.failures[:20]:
            print("  ", failure, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
