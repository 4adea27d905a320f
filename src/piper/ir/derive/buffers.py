"""Buffers that the forward writes."""

from collections.abc import Mapping

from piper.dtypes import DType
from piper.errors import DirectiveError, PlacementError
from piper.ids import ValueId
from piper.ir.dag import Chunk, Replication, Role
from piper.ir.derive.builder import Builder, communication, update_chunk
from piper.ops.all_reduce import AllReduce
from piper.ops.broadcast import Broadcast
from piper.ops.write_buffer import StoreBuffer


def store_buffers(builder: Builder) -> None:
    """Store the final value of each buffer that the forward writes, equal on all replicas."""
    writers = {name: builder.makers[v] for name, v in builder.dag.buffer_updates.items()}
    _refuse_distant_readers(builder, writers)
    read = {
        builder.values[v].name
        for chunk in builder.core()
        for v in chunk.inputs
        if builder.values[v].role is Role.BUFFER
    }
    for name, maker in writers.items():
        value, work = builder.dag.buffer_updates[name], StoreBuffer(name)
        # An unclaimed group is the planner's error: a directive to come may claim it.
        if maker.devices and len(maker.devices) > 1 and maker.replication is not None:
            replication = builder.dag.replications[maker.replication]
            if name not in read and replication.buffers in (None, "sum"):
                value = _last(builder, value, maker, replication)
            else:
                value = _agree(builder, name, value, maker, replication)
            if replication.buffers == "sum" and name in read:
                work = StoreBuffer(name, len(maker.devices))
        tags = builder.region(maker)
        builder.add(update_chunk(work, tags, (value,), maker.devices), [])


def _refuse_distant_readers(builder: Builder, writers: Mapping[str, Chunk]) -> None:
    if not writers:
        return
    for node in builder.nodes.values():
        if not isinstance(node, Chunk) or node.derived or node.devices is None:
            continue
        for value in node.inputs:
            info = builder.values[value]
            maker = writers.get(info.name) if info.role is Role.BUFFER else None
            if maker is not None and maker.devices not in (None, node.devices):
                raise PlacementError(
                    f"buffer {info.name!r} is written by {maker.label!r} on {list(maker.devices or ())} but read by "
                    f"{node.label!r} on {list(node.devices)}; place both on the same devices"
                )


def _last(builder: Builder, value: ValueId, maker: Chunk, replication: Replication) -> ValueId:
    """The value of the last replica, whose microbatches are the last in single-process training:
    of a buffer whose old value nothing reads, this is its value there.
    """
    assert maker.devices is not None
    group = (maker.devices[-1], *maker.devices[:-1])
    node = communication(
        Broadcast(), builder.region(maker), (value,), (group,), replication.reduce_stream
    )
    return builder.add(node, [builder.values[value]])[0]


def _agree(
    builder: Builder, name: str, value: ValueId, maker: Chunk, replication: Replication
) -> ValueId:
    """The value of a buffer that all replicas keep."""
    if replication.buffers is None:
        raise DirectiveError(
            f"the forward of {maker.label!r} writes buffer {name!r} on replicas {list(maker.devices or ())}, each from its own microbatches: "
            'single-process training has one sequence of them. Choose Replicate(..., replicated_buffers="sum") for counters, "first" or "mean", '
            "or a model without such buffers"
        )
    info = builder.values[value]
    averaged = replication.buffers == "mean" and info.spec.dtype.is_floating
    assert maker.devices is not None
    if replication.buffers == "sum":
        if info.spec.dtype is DType.BOOL:
            raise DirectiveError(
                f'buffer {name!r} holds truth values, of which replicated_buffers="sum" has no sum; choose "first"'
            )
        work: AllReduce | Broadcast = AllReduce()
    else:
        work = AllReduce(average=True) if averaged else Broadcast()
    node = communication(
        work, builder.region(maker), (value,), (maker.devices,), replication.reduce_stream
    )
    return builder.add(node, [info])[0]
