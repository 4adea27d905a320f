import subprocess
import sys
from types import ModuleType

import pytest

import piper


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", ["piper", "piper.models", "piper.training.config"])
def test_importing_does_not_load_ray(module):
    done = run(f"import sys, {module}\nassert 'ray' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_importing_piper_does_not_load_torch():
    done = run("import sys, piper\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists():
    assert set(piper.__all__) <= set(dir(piper))
    for name in piper.__all__:
        assert getattr(piper, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'shard_everything'"):
        piper.shard_everything  # noqa: B018 (the access is what fails)


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import piper.capture.joint, piper.plan.codec, piper.verify.report",
        "import piper.api.compile",
    ],
)
def test_functions_named_like_a_package_stay_functions(first):
    done = run(
        f"{first}\nimport piper\nassert all(map(callable, (piper.capture, piper.plan, piper.verify)))"
    )
    assert done.returncode == 0, done.stderr
    assert not isinstance(piper.plan, ModuleType)
