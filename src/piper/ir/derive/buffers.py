"""Buffers that the forward writes."""

from piper.errors import DirectiveError, PlacementError
from piper.ids import ValueId
from piper.ir.dag import Chunk, Role
from piper.ir.derive.builder import Builder, communication, update_chunk
from piper.ops.all_reduce import AllReduce
from piper.ops.broadcast import Broadcast
from piper.ops.write_buffer import StoreBuffer


def store_buffers(builder: Builder) -> None:
    """Store the final value of each buffer that the forward writes, equal on all replicas."""
    for name, value in builder.dag.buffer_updates.items():
        maker = builder.makers[value]
        _refuse_distant_readers(builder, name, maker)
        final = value
        if maker.devices is not None and len(maker.devices) > 1:
            final = _agree(builder, name, value, maker)
        builder.add(update_chunk(StoreBuffer(name), maker.tags, (final,), maker.devices), [])


def _refuse_distant_readers(builder: Builder, name: str, maker: Chunk) -> None:
    for node in builder.nodes.values():
        if not isinstance(node, Chunk) or node.derived or node.devices == maker.devices:
            continue
        for value in node.inputs:
            info = builder.values[value]
            if info.role is Role.BUFFER and info.name == name:
                raise PlacementError(
                    f"buffer {name!r} is written by {maker.label!r} on {list(maker.devices or ())} but read by {node.label!r} "
                    f"on {list(node.devices or ())}; place both on the same devices"
                )


def _agree(builder: Builder, name: str, value: ValueId, maker: Chunk) -> ValueId:
    replication = builder.replication(maker)
    if replication is None or replication.buffers is None:
        raise DirectiveError(
            f"the forward of {maker.label!r} writes buffer {name!r} on replicas {list(maker.devices or ())}, each from its own microbatches: "
            'single-process training has one sequence of them. Choose Replicate(..., replicated_buffers="first") or "mean", '
            "or a model without such buffers"
        )
    info = builder.values[value]
    averaged = replication.buffers == "mean" and info.spec.dtype.is_floating
    assert maker.devices is not None
    work = AllReduce(average=True) if averaged else Broadcast()
    node = communication(work, maker.tags, (value,), (maker.devices,), replication.reduce_stream)
    return builder.add(node, [info])[0]
