"""Gathers: where parameters are sharded, each chunk reads whole ones that were made for it.

Each chunk has gathers of its own; the planner lets consecutive chunks share one, and starts it
early.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from piper.ids import ValueId
from piper.ir.dag import Chunk, DeviceGroup, Level, Replication, Role, Tags
from piper.ir.derive.builder import Builder, communication
from piper.ir.derive.sharding import (
    level_of,
    shard_groups,
    shard_value,
    users_of_parameters,
)
from piper.ops.all_gather import AllGather


def gather_parameters(builder: Builder) -> None:
    """Let every core chunk whose parameters are sharded read gathered ones."""
    buckets = _buckets(builder)
    for chunk in builder.core():
        replication = builder.replication(chunk)
        if (
            replication is None
            or replication.level is not Level.PARAMETERS
            or chunk.devices is None
        ):
            continue
        whole: dict[ValueId, ValueId] = {}
        for value in chunk.inputs:
            info = builder.values[value]
            if info.role is not Role.PARAMETER or value in whole:
                continue
            if level_of(builder, info.name, replication) is not Level.PARAMETERS:
                continue
            whole.update(_gather(builder, chunk, chunk.devices, replication, buckets[info.name]))
        if whole:
            inputs = tuple(whole.get(v, v) for v in chunk.inputs)
            builder.nodes[chunk.id] = replace(chunk, inputs=inputs)


def _gather(
    builder: Builder,
    chunk: Chunk,
    devices: DeviceGroup,
    replication: Replication,
    names: tuple[str, ...],
) -> Iterator[tuple[ValueId, ValueId]]:
    """Gather a bucket for *chunk*: pairs of the parameter's value and the gathered one."""
    parameters = {name: builder.parameter(name) for name in names}
    shards = tuple(builder.source(shard_value(builder, name)) for name in names)
    node = communication(
        AllGather(use=chunk.id),
        chunk.tags,
        shards,
        shard_groups(builder, names[0], replication, devices),
        replication.gather_stream,
        chunk.pass_,
    )
    results = [replace(builder.values[parameters[n]], role=Role.GATHERED) for n in names]
    outputs = builder.add(node, results)
    return iter([(parameters[n], v) for n, v in zip(names, outputs, strict=True)])


def _buckets(builder: Builder) -> dict[str, tuple[str, ...]]:
    """The bucket of each parameter that is gathered: parameters of one region and element type, in
    order of use, up to the bucket size.
    """
    order: dict[tuple[object, ...], list[str]] = {}
    limits: dict[tuple[object, ...], int | None] = {}
    users = users_of_parameters(builder)
    for name, chunks in users.items():
        replication = builder.replication(chunks[0])
        if level_of(builder, name, replication) is not Level.PARAMETERS or replication is None:
            continue
        regions: tuple[Tags, ...] = tuple(dict.fromkeys(builder.region(c) for c in chunks))
        key = (
            regions,
            builder.dag.parameters[name].spec.dtype,
            chunks[0].replication,
            builder.experts.get(name),
        )
        order.setdefault(key, []).append(name)
        limits[key] = replication.bucket_bytes
    found: dict[str, tuple[str, ...]] = {}
    for alike, names in order.items():
        for bucket in builder.cut(names, limits[alike]):
            found.update(dict.fromkeys(bucket, tuple(bucket)))
    return found
