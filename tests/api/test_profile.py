"""Measured timelines: everything is recorded, in an order that the plan allows, and training goes
on as if nothing had been measured.
"""

import itertools

import pytest
import torch

import piper
from piper import strategies
from piper.api.programs import model_tensors
from piper.backends.clocks import clock_offsets
from piper.backends.inprocess import InProcessBackend
from piper.devices.cpu import CpuDevice
from piper.errors import BatchError, StateError
from piper.models.mlp import MLP, MLPConfig
from piper.runtime.batch import signature
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.record import Clock
from piper.runtime.slices import Form
from piper.runtime.worker import Worker
from piper.simulate.timeline import Source

ROWS, WIDTH = 16, 32


def loss(outputs, targets):
    return torch.nn.functional.mse_loss(outputs, targets)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)
    )


def mlp():
    config = MLPConfig(in_features=WIDTH, width=64, out_features=WIDTH, num_stages=2)
    return MLP(config).double()


def trainer(zero=0, backend=None):
    torch.manual_seed(0)
    return piper.compile(
        mlp(),
        loss,
        strategies.pipeline("1f1b", [[0, 1], [2, 3]], 4, zero=zero),
        batch(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        backend=backend or InProcessBackend(threads=1),
    )


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_every_instruction_that_works_is_a_box(zero):
    with trainer(zero) as running:
        line = running.profile(*batch(), steps=2)
        plan = running.program.plan
    assert line.source is Source.MEASURED
    for mine, recorded in zip(plan.devices, line.devices, strict=True):
        expected = {
            i
            for i, instruction in enumerate(mine.instructions)
            if not instruction.asynchronous and (instruction.reads() or instruction.writes())
        }
        boxes = list(recorded.boxes())
        assert expected <= {b.position for b in boxes}
        assert all(0 <= b.start < b.end <= line.seconds for b in boxes)
        local = sorted((b for b in boxes if not b.meeting), key=lambda b: b.position)
        assert all(one.end <= two.start for one, two in itertools.pairwise(local))


def test_chunks_follow_what_they_read():
    with trainer(2) as running:
        line = running.profile(*batch(), steps=1)
        dag = running.dag
    ends = {}
    for mine in line.devices:
        for box in mine.boxes():
            ends[mine.device, box.node] = max(ends.get((mine.device, box.node), 0), box.end)
    for mine in line.devices:
        for box in (b for b in mine.boxes() if b.op == "compute"):
            for before in dag.predecessors[box.node]:
                assert ends.get((mine.device, before), 0) <= box.start


def test_the_critical_path_goes_through_the_step():
    with trainer() as running:
        line = running.profile(*batch(), steps=3)
    path = line.critical_path
    assert len(path) > 4
    starts = [link.start for link in path]
    assert starts == sorted(starts)
    assert {link.op for link in path} >= {"compute"}


def test_profiled_steps_train_like_others():
    with trainer(1) as one, trainer(1) as two:
        one.step(*batch())
        one.profile(*batch(1), steps=2)
        one.step(*batch())
        two.step(*batch())
        for _ in range(2):
            two.step(*batch(1))
        two.step(*batch())
        assert one.steps_done == two.steps_done == 4
        first, second = one.state_dict(), two.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("ranges", [False, True])
def test_ranges_of_torchs_profiler_carry_the_nodes_names(ranges):
    """A worker on this thread, which is the one that torch's profiler looks at."""
    torch.manual_seed(0)
    plan = piper.plan(piper.apply(piper.capture(mlp(), loss, batch()), []))
    worker = Worker(0, 1, CpuDevice, no_communicator)
    worker.load("train", plan, plan.devices[0], signature(batch()), {})
    forms = {n: Form(whole=True) for n in (*plan.dag.parameters, *plan.dag.buffers)}
    spec = OptimizerSpec(lambda p: torch.optim.SGD(p, lr=0.1))
    worker.initialise("train", model_tensors(mlp()), forms, spec)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        worker.profile("train", lambda _: batch(), first_step=0, num_steps=1, seed=0, ranges=ranges)
    found = {event.name for event in profiler.events()}
    assert ({"compute F PP=0", "compute B PP=1"} <= found) == ranges


def no_communicator(name, members):
    raise NotImplementedError


def test_no_steps():
    with trainer() as running:
        with pytest.raises(BatchError, match="at least 1, found 0"):
            running.profile(*batch(), steps=0)
        running.step(*batch(), update=False)
        with pytest.raises(StateError, match="update before profiling"):
            running.profile(*batch())


class Apart(InProcessBackend):
    """Workers that seem to be on machines whose clocks differ by known amounts."""

    def _call(self, method, arguments):
        results = super()._call(method, arguments)
        if method == "clock":
            return [Clock(f"machine {i}", c.seconds + 1000 * i) for i, c in enumerate(results)]
        return results


def test_clocks_of_several_machines_are_aligned():
    backend = Apart(threads=1)
    with trainer(backend=backend):
        offsets, error = clock_offsets(backend._read_clocks)
        assert offsets[0] == 0
        assert 0 < error < 1
        for i, offset in enumerate(offsets):
            assert abs(offset - 1000 * i) <= error
