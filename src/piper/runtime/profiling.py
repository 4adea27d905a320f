"""Measure how long the parts of a plan take on this machine, each by itself on an idle device: the contents of a
:class:`~piper.plan.profile.Profile`.

The quickest of several calls counts: other work on the machine only ever adds.
"""

import platform
import time
from collections.abc import Callable, Mapping

import torch

from piper.devices.cpu import CpuDevice
from piper.devices.links import LARGE, SMALL, LinkTimes
from piper.devices.tensors import torch_dtype
from piper.ids import BodyId
from piper.ir.body import Body, TensorSpec
from piper.ops.base import RandomKey
from piper.ops.compute import Compute
from piper.ops.update import OptimizerStep
from piper.plan.model import Plan
from piper.plan.profile import VERSION, Profile, Rate, chunk_key
from piper.runtime.code import chunk_function
from piper.runtime.state import ModelState, OptimizerSpec

LAUNCH = 1e-6
"""Seconds that the interpreter spends per instruction (see ``benchmarks/interpreter.py``)."""

UNCACHED = 64 * 1024 * 1024
"""Bytes that no cache holds: contributions that are added have been written a whole backward ago."""

_WARM_UP = 2


def measure_profile(
    plan: Plan,
    optimizer: OptimizerSpec | None,
    links: LinkTimes,
    *,
    repeats: int = 10,
    on_chunk: Callable[[str], None] = lambda _: None,
) -> Profile:
    """The profile of *plan* on a CPU of this machine, with torch's present number of threads. *on_chunk* is called with the label of each
    chunk before it is measured.
    """
    labels: dict[BodyId, str] = {}
    for mine in plan.devices:
        for instruction in mine.instructions:
            if isinstance(instruction, Compute):
                node = plan.dag.nodes[instruction.node]
                labels.setdefault(instruction.body, node.label)
    chunks: dict[str, float] = {}
    with torch.no_grad():
        for name, label in labels.items():
            on_chunk(label)
            seconds = chunk_seconds(plan.dag.bodies[name], plan.bindings, repeats)
            chunks[chunk_key(name, plan.bindings)] = seconds
        rates = {
            "*": _rate(lambda n: _copying(n, repeats)),
            "accumulate": _rate(lambda n: _adding(n, repeats)),
            "send": _line(links.issue[SMALL], links.issue[LARGE], SMALL, LARGE),
        }
        if optimizer is not None:
            rates["optimizer_step"] = _update_rate(plan, optimizer, repeats)
    threads = torch.get_num_threads()
    return Profile(
        version=VERSION,
        machine=f"{platform.node()}, {platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}",
        chunks=chunks,
        rates=rates,
        launch=LAUNCH,
        latency=links.latency,
        bandwidth=links.bandwidth,
    )


def chunk_seconds(body: Body, bindings: Mapping[str, int], repeats: int) -> float:
    """Seconds of one call of *body* on inputs of the right shapes: random numbers, zeros for integers."""
    function = chunk_function(body, bindings, torch.device("cpu"))
    inputs = [_example(spec, bindings) for spec in body.inputs]
    key = RandomKey(0, 0, 0, tuple(range(body.num_rngs))) if body.num_rngs else None
    return _quickest(lambda: function(list(inputs), key), repeats)


def _example(spec: TensorSpec, bindings: Mapping[str, int]) -> torch.Tensor:
    shape, dtype = spec.sizes(bindings), torch_dtype(spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def _quickest(work: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for turn in range(_WARM_UP + repeats):
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        if turn >= _WARM_UP:
            best = min(best, seconds)
    return best


def _rate(seconds: Callable[[int], float]) -> Rate:
    """From the times for little and much, in bytes."""
    return _line(seconds(SMALL), seconds(UNCACHED), SMALL, UNCACHED)


def _line(short: float, long: float, few: int, many: int) -> Rate:
    """The straight line through two points; it does not fall."""
    per_byte = max(0.0, long - short) / (many - few) if many > few else 0.0
    return Rate(max(0.0, short - few * per_byte), per_byte)


# The bytes of a rate are all that are read or written, as the simulator counts them.


def _copying(nbytes: int, repeats: int) -> float:
    source = torch.zeros(nbytes // 8, dtype=torch.float32)
    return _quickest(source.clone, repeats)


def _adding(nbytes: int, repeats: int) -> float:
    # An accumulation reads the total and the contribution, and writes the total.
    device = CpuDevice()
    a, b = torch.zeros(nbytes // 12), torch.zeros(nbytes // 12)
    return _quickest(lambda: device.add_(a, b), repeats)


def _update_rate(plan: Plan, optimizer: OptimizerSpec, repeats: int) -> Rate:
    """From the plan's largest and smallest update, of whole parameters."""
    steps = [i.names for m in plan.devices for i in m.instructions if isinstance(i, OptimizerStep)]
    if not steps:
        return Rate(0.0, 0.0)
    specs = {name: plan.dag.parameters[name].spec for names in steps for name in names}
    tensors = {n: torch.zeros(s.sizes({}), dtype=torch_dtype(s.dtype)) for n, s in specs.items()}
    model = {name: plan.dag.parameters[name] for name in tensors}
    # Groups name parameters of the whole model; how long an update takes does not depend on them.
    spec = OptimizerSpec(build=optimizer.build)
    state = ModelState(tensors, {}, model, spec, torch.device("cpu"))
    by_size = sorted(steps, key=lambda names: sum(specs[n].nbytes() for n in names))
    points: list[tuple[float, int]] = []
    for names in (by_size[0], by_size[-1]):
        gradients = {name: torch.randn_like(tensors[name]) for name in names}
        with torch.enable_grad():
            seconds = _quickest(lambda g=gradients: state.update(g, None), repeats)  # type: ignore[misc]
        points.append((seconds, 2 * sum(specs[n].nbytes() for n in names)))
    (short, few), (long, many) = points
    if many < 2 * few:  # too close to tell a fixed part from noise
        return Rate(0.0, long / many)
    return _line(short, long, few, many)
