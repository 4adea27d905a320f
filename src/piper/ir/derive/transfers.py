"""Transfers: a value travels to each device group that reads it and does not make it."""

from collections.abc import Mapping
from functools import lru_cache

from msgspec.structs import replace

from piper.errors import PlacementError
from piper.ids import NodeId, Stream, ValueId
from piper.ir.dag import Chunk, DeviceGroup
from piper.ir.derive.builder import P2P_STREAM, Builder, communication
from piper.ir.derive.experts import Exchange
from piper.ops.p2p import Transfer


def link(builder: Builder) -> None:
    """Let every core chunk read values that are on its devices, and of its experts."""
    core = {chunk.id: chunk for chunk in builder.core()}
    links = _Links(builder, core)
    for chunk in core.values():
        inputs = tuple(links.bring(v, chunk) for v in chunk.inputs)
        if inputs != chunk.inputs:
            builder.nodes[chunk.id] = replace(chunk, inputs=inputs)


class _Links:
    """Brings values to their readers."""

    def __init__(self, builder: Builder, core: Mapping[NodeId, Chunk]) -> None:
        self._builder = builder
        self._arrived: dict[tuple[ValueId, DeviceGroup], ValueId] = {}
        self._exchange = Exchange(builder, core, self._move)

    def bring(self, value: ValueId, reader: Chunk) -> ValueId:
        """*value* as *reader* reads it: out of its maker's sharded region, to the reader's devices,
        into its region.
        """
        maker = self._builder.makers.get(value)
        if maker is None or maker.devices is None or reader.devices is None:
            return value
        if maker.sharding is not None and reader.sharding is None:
            return self._exchange.leave(value, maker, reader)
        if maker.sharding is None and reader.sharding is not None:
            return self._exchange.enter(value, maker, reader)
        return self._move(value, maker, reader.devices, reader)

    def _move(self, value: ValueId, maker: Chunk, to: DeviceGroup, reader: Chunk) -> ValueId:
        """*value*, which lives where *maker* runs, on the devices *to*, for *reader*."""
        if to == maker.devices:
            return value
        key = (value, to)
        if key not in self._arrived:
            stream = maker.p2p_stream or reader.p2p_stream or P2P_STREAM
            self._arrived[key] = transfer(self._builder, value, maker, to, reader.label, stream)
        return self._arrived[key]


def transfer(
    builder: Builder, value: ValueId, maker: Chunk, to: DeviceGroup, reader: str, stream: Stream
) -> ValueId:
    """Send *value*, which lives where *maker* runs, to the group *to*; the value that arrives
    there.
    """
    assert maker.devices is not None
    where = (
        f"{maker.label!r} on devices {list(maker.devices)} feeds {reader!r} on devices {list(to)}"
    )
    if len(maker.devices) != len(to):
        raise PlacementError(
            f"{where}: linked device groups must have equal sizes (member i sends to member i); only an expert region may be on a group of another "
            "size, to which its Shard puts it instead of a Place"
        )
    pairs = _pairs(maker.devices, to)
    if not set(maker.devices).isdisjoint(to):
        raise PlacementError(f"{where}: linked device groups must be the same, or share no device")
    node = communication(Transfer(), maker.tags, (value,), pairs, stream, maker.pass_)
    return builder.add(node, [builder.values[value]])[0]


@lru_cache(maxsize=1024)
def _pairs(senders: DeviceGroup, receivers: DeviceGroup) -> tuple[DeviceGroup, ...]:
    """Member i with member i: one object, however many messages go between two large groups."""
    return tuple(zip(senders, receivers, strict=True))
