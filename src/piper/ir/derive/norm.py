"""The norm of all gradients: every parameter counts once, however many copies of it there are."""

from collections.abc import Mapping, Sequence

from piper.dtypes import DType
from piper.ids import ValueId
from piper.ir.body import TensorSpec
from piper.ir.dag import UNNUMBERED, Clip, DeviceGroup, Role, Tags, Value
from piper.ir.derive.builder import REDUCE_STREAM, Builder, Group, communication, update_chunk
from piper.ops.all_reduce import AllReduce
from piper.ops.grad_norm import NormPart, NormRoot, NormSum

SCALAR = Value(UNNUMBERED, TensorSpec((), DType.FLOAT64), Role.NORM, "grad_norm")
"""A part of the norm, or the norm."""


def measure(
    builder: Builder,
    clip: Clip,
    gradients: Sequence[ValueId],
    scales: Sequence[ValueId],
    region: Tags,
    owners: Group,
) -> ValueId:
    """What *gradients*, divided by the one of *scales* that is there, add to the norm, on each of
    *owners*.
    """
    work = NormPart(clip.norm, scaled=bool(scales))
    return builder.add(update_chunk(work, region, (*gradients, *scales), owners), [SCALAR])[0]


def combine(
    builder: Builder, clip: Clip, parts: Mapping[ValueId, Group], devices: Group
) -> ValueId:
    """The norm whose parts are *parts*, each with the devices that have one, on all of
    *devices*.
    """
    sums = [
        builder.add(update_chunk(NormSum(clip.norm), (), mine, home), [SCALAR])[0]
        for home, mine in _by_home(parts, devices).items()
    ]
    whole = sums[0]
    # Even where all devices have parts of the same name: slices, of which each device has its own.
    if devices is not None and len(devices) > 1:
        work = AllReduce(reduce=clip.norm.combines)
        (whole,) = builder.add(communication(work, (), sums, (devices,), REDUCE_STREAM), [SCALAR])
    return builder.add(update_chunk(NormRoot(clip.norm), (), (whole,), devices), [SCALAR])[0]


def _by_home(parts: Mapping[ValueId, Group], devices: Group) -> dict[Group, tuple[ValueId, ...]]:
    """*devices* in groups of those that have the same parts, with these."""
    if devices is None:
        return {None: tuple(parts)}
    mine = {d: tuple(v for v, owners in parts.items() if d in (owners or ())) for d in devices}
    homes: dict[tuple[ValueId, ...], DeviceGroup] = {}
    for device in devices:
        homes[mine[device]] = (*homes.get(mine[device], ()), device)
    return {home: values for values, home in homes.items()}
