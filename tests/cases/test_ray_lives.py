"""Several trainers on Ray in one process: each lives its own life."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

START = """
import time
import pytest, ray, torch, piper
from piper.errors import *
F = torch.nn.functional
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        with piper.annotate("PP", 0): h = self.a(x)
        with piper.annotate("PP", 1): return self.b(h)
batch = torch.randn(4, 4), torch.randn(4, 4)
strategy = piper.strategies.pipeline("1f1b", [[0], [1]], 2)
def sgd(p): return torch.optim.SGD(p, lr=0.1)
def make(**options):
    backend = piper_backend(**options) if options else "ray"
    return piper.compile(Model(), F.mse_loss, strategy, batch, optimizer=sgd, backend=backend)
def piper_backend(**options):
    from piper.backends import make_backend
    return make_backend("ray", **options)
"""


def run(code: str) -> str:
    program = START + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trainer_can_be_made_while_another_is_open_and_each_ends_alone():
    out = run(
        """
        first = make()
        second = make()  # as a cell of a notebook that is run again
        assert not first._backend._resource == "CPU"
        first.step(*batch); second.step(*batch)
        first.close(); first.close()
        second.step(*batch)  # goes on
        assert ray.is_initialized()
        with pytest.raises(StateError, match="this trainer is closed"):
            first.step(*batch)
        with pytest.raises(RunError, match="it was closed"):
            first._backend.snapshot()
        third = make()
        second = None  # nobody refers to it: it closes itself
        third.step(*batch)
        third = make()
        third.step(*batch)
        assert ray.is_initialized()
        third.close()
        assert not ray.is_initialized()  # what piper started ends with its last user
        fourth = make()
        fourth.step(*batch)
        ray.shutdown()
        with pytest.raises(RunError, match="Ray that the workers were in has ended"):
            fourth.step(*batch)
        assert not ray.is_initialized()  # and none starts by itself
        fourth.close()
        print("reached")
        last = make()  # open when the interpreter ends
        """
    )
    assert out.split() == ["reached"]


def test_in_a_ray_of_the_users_who_holds_the_places_is_said_at_once():
    out = run(
        """
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        first = make()
        begin = time.monotonic()
        with pytest.raises(ConfigError, match="trainer on 2 devices that was made at <string>:\\d+.*[Cc]lose it"):
            make()
        print(time.monotonic() - begin < 30)
        first.step(*batch)
        first.close()
        second = make()
        second.step(*batch)
        second.close()
        assert ray.is_initialized()  # the user's own is left alone
        """
    )
    assert out.split() == ["True"]
