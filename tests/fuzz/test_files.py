"""Damaged files are read, or refused with one of piper's errors, quickly."""

import pytest

from tests.fuzz.campaign import Result, attempt, run
from tests.fuzz.readers import NAMES, reader

FILES = 200
"""Of each reader; ``make fuzz-files N=20000`` reads more."""


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_read_or_refused(name, tmp_path):
    result = run(reader(name), range(FILES), save=tmp_path)
    assert not result.failures, "\n".join(result.failures[:10])
    assert sum(result.outcomes.values()) == FILES
    refused = FILES - result.outcomes["read"]
    assert refused > FILES // 20, "damage is to be noticed"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_single_bit_of_a_checkpoint_counts(tmp_path):
    checkpoint = reader("checkpoint")
    (files,) = checkpoint.originals
    for name, data in files.items():
        for place in range(8 * len(data)):
            changed = bytearray(data)
            changed[place // 8] ^= 1 << place % 8
            outcome = attempt(
                checkpoint, {**files, name: bytes(changed)}, tmp_path / "case", Result()
            )
            assert outcome == "CheckpointError", f"{name}, bit {place}: {outcome}"
