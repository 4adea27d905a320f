import subprocess
import sys

import pytest

PROGRAM = """
import sys
import {module}
assert "ray" not in sys.modules
"""


@pytest.mark.parametrize("module", ["piper", "piper.models", "piper.training.config"])
def test_importing_does_not_load_ray(module):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
