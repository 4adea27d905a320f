"""Typed identifiers shared by every layer."""

from typing import NewType

NodeId = NewType("NodeId", int)
"""A node of a training DAG."""

ValueId = NewType("ValueId", int)
"""A named value of a training DAG: a parameter, a batch input, an activation, a gradient."""

BodyId = NewType("BodyId", str)
"""Content hash of a chunk body (hexadecimal)."""

DeviceId = NewType("DeviceId", int)
"""A device's number, counted from 0 over the whole job; also its rank."""

Slot = NewType("Slot", int)
"""Index into the value table of one device's plan."""

EventId = NewType("EventId", int)
"""Completion of one instruction of one device's plan."""

Stream = NewType("Stream", str)
"""Name of a logical stream: work on one stream runs in the order in which it was issued."""

COMPUTE = Stream("compute")
"""The stream that runs chunks unless a directive names another."""
