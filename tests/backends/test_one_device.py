"""One device, no peers: nothing to agree about, nothing to connect."""

import pytest
from tests.backends.test_captured import Dropping, batch, loss_fn, momentum
from tests.backends.test_inprocess import losses

from piper.backends import make_backend
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["inprocess", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_plan_for_one_device_runs(name):
    from piper.capture import capture_with_constants
    from piper.planner import plan

    model = Dropping()
    captured = capture_with_constants(model, loss_fn, batch(0))
    with make_backend(name, threads=1) as backend:
        backend.start(1)
        backend.load("train", plan(captured.dag), signature(batch(0)), captured.constants)
        backend.initialise("train", dict(model.named_parameters()), OptimizerSpec(momentum))
        explicit = backend.run("train", [batch(0), batch(1)], first_step=0, seed=1)
        stopped = backend.run(
            "train", lambda s: (batch(s)[0][:2], batch(s)[1][:2]), first_step=2, num_steps=2
        )
    assert len(losses(explicit)) == 2
    assert (stopped.steps, stopped.stopped_at) == ((), 2)
