"""The plan: for each device, the instructions of one training step, in issue order.

A plan carries the final training DAG that it implements, so that the verifier can hold one against
the other, and everything that a worker needs to know about the batch and the model state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from piper.brief import brief, count
from piper.ids import DeviceId, Slot, ValueId
from piper.ir.dag import Dag, Role
from piper.ops.base import CommunicatorId, Instruction, Message

VERSION = 1
"""Format version of plan files; a file of another version is refused."""


class SlotInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry of a device's value table: the DAG value that it holds, and its bound shape and
    type.

    Slots with role PARAMETER, SHARD, BUFFER, KEPT, SEED and SCALE are filled before the step and
    never freed (the plan's *state* slots); ``name`` is the parameter's or buffer's. All others
    start empty and end empty. ``shard`` is, for role SHARD, which of how many slices the slot
    holds; ``experts``, for a parameter (or slice of one) of which the device holds a part of the
    experts, which of how many parts.
    """

    value: ValueId
    role: Role
    name: str
    message: Message
    shard: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None


def _brief_device_plan(it: "DevicePlan") -> str:
    return f"device {it.device}: {count(len(it.instructions), 'instruction')}, {count(len(it.slots), 'slot')}"


@brief(_brief_device_plan)
class DevicePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one device does in a step."""

    device: DeviceId
    slots: tuple[SlotInfo, ...]
    instructions: tuple[Instruction, ...]


def frees_behind(instructions: Sequence[Instruction], position: int) -> range:
    """The positions of what frees slots right after the instruction at *position*, on its stream:
    that instruction is free to empty them itself.
    """
    stream, end = instructions[position].stream, position + 1
    for following in islice(instructions, end, None):
        idle = not (following.reads() or following.writes())
        if not (idle and following.frees() and following.stream == stream):
            break
        end += 1
    return range(position + 1, end)


def freed_behind(instructions: Sequence[Instruction], position: int) -> frozenset[Slot]:
    """The slots that :func:`frees_behind` empties."""
    behind = frees_behind(instructions, position)
    return frozenset(slot for i in behind for slot in instructions[i].frees())


class CommunicatorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A communicator that the plan uses; rank i of it is ``members[i]``."""

    name: CommunicatorId
    members: tuple[DeviceId, ...]


def _brief_plan(it: "Plan") -> str:
    return f"{count(it.num_devices, 'device')}, {count(it.num_replicas, 'replica')} of {count(it.num_microbatches, 'microbatch').replace('hs', 'hes')} of {count(it.microbatch_size, 'row')}; {len(it.dag.nodes)} nodes, {sum(len(d.instructions) for d in it.devices)} instructions"


@brief(_brief_plan)
@dataclass(frozen=True)
class Plan:
    """One training step on ``num_devices`` devices.

    ``bindings`` gives each symbol its size. A global batch has ``num_replicas * num_microbatches *
    microbatch_size`` rows; replica r's microbatch m is global microbatch ``r * num_microbatches +
    m``. ``seed_value`` is the gradient of the step's loss with respect to one microbatch's loss (1
    for a weighted loss, whose gradients are divided by the total weight before the update).

    A *folded* plan has a program for one device of each of ``roles`` only, the first; the role's
    other devices do the same with device numbers, replicas and slices renamed (see
    :mod:`piper.plan.roles`), and have an empty program here. It can be verified and simulated, not
    run. A plan that is not folded has no roles.
    """

    num_devices: int
    dag: Dag
    bindings: Mapping[str, int]
    microbatch_size: int
    num_microbatches: int
    num_replicas: int
    seed_value: float
    communicators: tuple[CommunicatorInfo, ...]
    devices: tuple[DevicePlan, ...]
    roles: tuple[tuple[DeviceId, ...], ...] = ()

    def represented(self) -> tuple[tuple[DeviceId, ...], ...]:
        """For each device that has a program, all devices that do the same, itself first."""
        return self.roles or tuple((mine.device,) for mine in self.devices)
