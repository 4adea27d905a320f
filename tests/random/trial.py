"""Train a case under its strategies and plainly, and compare everything after each action."""

import contextlib
import math
import tempfile
import warnings
from pathlib import Path

import torch
from tests.random.reference import Diverged, Options, Plain, Types

import piper
from piper.backends.inprocess import InProcessBackend

FLOOR = 1e-4
"""Norms below this fraction of the largest of their kind count as that much."""


class Wrong(Exception):  # noqa: N818 (a finding)
    """The two trainings differ."""


def train(case):
    """Raise :class:`Wrong`, :class:`Diverged`, or what piper raises; *case* is a namespace with
    the definitions of a case.
    """
    torch.manual_seed(case["SEED"] % 1000)
    model = case["Model"]()
    plain = Plain(model, case["loss_fn"], _options(case))
    number, layouts = 0, iter(case["LAYOUTS"])
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        layout = next(layouts)
        trainer, backend = _trainer(stack, case, model, layout)
        for action in case["ACTIONS"]:
            if action in ("reload", "switch"):
                layout = next(layouts)
                if action == "reload":
                    trainer.save(Path(folder) / "checkpoint")
                state = trainer.state_dict()
                trainer.close()
                trainer, backend = _trainer(stack, case, model, layout)
                if action == "reload":
                    trainer.load(Path(folder) / "checkpoint")
                else:
                    trainer.load_state_dict(state)
                    plain.steps, plain.good = 0, 0
                    plain.scale = plain.options.types and plain.options.types.scale
            elif action == "evaluate":
                inputs, targets = case["batch"](1000 + number * 2, case["ROWS"] + number)
                wanted = plain.evaluate(inputs, targets, case["ROWS"] + number)
                _numbers(
                    f"loss of evaluation {number}",
                    trainer.evaluate(inputs, targets).loss,
                    wanted,
                    case,
                )
            else:
                inputs, targets = case["batch"](number)
                _, replicas, microbatches, buffers = layout
                update = action == "update"
                wanted = plain.step(inputs, targets, replicas, microbatches, buffers, update)
                found = trainer.step(inputs, targets, update=update)
                _numbers(f"loss of step {number}", found.loss, wanted.loss, case)
                _numbers(f"norm in step {number}", found.grad_norm, wanted.norm, case)
                if (found.skipped, found.loss_scale) != (wanted.skipped, wanted.scale):
                    raise Wrong(f"step {number}: {found}, expected {wanted}")
                _compare_copies(number, backend, plain, case)
                number += 1
            _tensors(
                f"after action {action} ({number} steps)", trainer.state_dict(), plain.state(), case
            )
        _compare_optimizers(backend, plain, case)


def _options(case):
    given = case["COMPILE"]
    types, policy = None, given.get("precision")
    if policy is not None:
        types = Types(policy.compute, policy.reduce, policy.master, policy.output)
        if policy.loss_scale is not None:
            scale = policy.loss_scale
            types.scale, types.growth, types.backoff = scale.init, scale.growth, scale.backoff
            types.interval = scale.growth_interval
    return Options(
        given["optimizer"],
        given["seed"],
        given.get("param_groups"),
        given.get("lr_schedule"),
        given.get("max_grad_norm"),
        given.get("norm_type", 2.0),
        types,
    )


def _trainer(stack, case, model, layout):
    backend = "ray"
    if case["BACKEND"] != "ray":
        backend = InProcessBackend(threads=1, timeout=60.0, poison=True, delay=case["DELAY"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = piper.compile(
            model, case["loss_fn"], layout[0], case["batch"](0), backend=backend, **case["COMPILE"]
        )
    return stack.enter_context(trainer), backend


def _compare_copies(number, backend, plain, case):
    """Every device's copy, or slice, of parameters and buffers."""
    if backend == "ray":
        return
    state = plain.state()
    for device, copies in enumerate(backend.copies()):
        where = f"device {device} after {number} steps"
        held = {**copies.parameters, **copies.buffers}
        _tensors(where, held, {n: state[n].to(t.dtype) for n, t in held.items()}, case, part=True)
        slices = {n: s.tensor for n, s in copies.shards.items()}
        wanted = {n: s.part.of(state[n]) for n, s in copies.shards.items()}
        _tensors(where, slices, wanted, case, part=True)


def _compare_optimizers(backend, plain, case):
    if backend == "ray":
        return
    found = {}
    for name, entries in backend.snapshot().optimizer.state.items():
        for key, value in entries.items():
            if value is not None:
                found[name, key] = torch.as_tensor(value)
    wanted = plain.optimizer_state()
    for key in sorted({key for _, key in (*found, *wanted)}):
        one, other = (
            {name: t for (name, k), t in state.items() if k == key} for state in (found, wanted)
        )
        _tensors(f"{key} of the optimizer", one, other, case)


def _tensors(where, found, wanted, case, part=False):
    if not part and not found.keys() <= wanted.keys():
        raise Wrong(f"{where}: found {sorted(found.keys() - wanted.keys())}")
    largest = max((float(t.double().norm()) for t in wanted.values()), default=0.0)
    for name, tensor in found.items():
        expected = wanted[name]
        if tensor.shape != expected.shape:
            raise Wrong(f"{where}: {name} is {tuple(tensor.shape)}, not {tuple(expected.shape)}")
        distance = float((tensor.double() - expected.double()).norm())
        scale = max(float(expected.double().norm()), FLOOR * largest, 1e-30)
        if not distance / scale <= case["TOLERANCE"]:
            raise Wrong(f"{where}: {name} differs by {distance / scale:.1e} of its norm")


def _numbers(what, found, wanted, case):
    if (found is None) != (wanted is None):
        raise Wrong(f"{what}: found {found}, expected {wanted}")
    if found is None or found == wanted or (math.isnan(found) and math.isnan(wanted)):
        return
    if not abs(found - wanted) <= case["TOLERANCE"] * max(abs(wanted), 1e-3):
        raise Wrong(f"{what}: found {found!r}, expected {wanted!r}")


def main(case):
    """Say whether the two trainings are equal."""
    try:
        train(case)
    except Diverged as error:
        print(f"the plain training diverges: {error}")  # noqa: T201
    else:
        print("equal")  # noqa: T201
