"""Plans and DAGs as JSON: a manifest and one file per device. Equal plans give equal bytes.

A field typed as a base class (``Work``, ``Instruction``) is decoded as the union of the registered
subclasses, so a new operation needs no change here. Unknown fields and other versions are errors
that name their path.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, Union

import msgspec

import piper.ops  # noqa: F401  (fills the registries)
from piper.boundary import public
from piper.errors import PlanError, expect
from piper.ids import BodyId, DeviceId, NodeId, ValueId
from piper.ir.body import Body, body_id
from piper.ir.check_form import dag_problems
from piper.ir.dag import (
    BatchLeaf,
    Buffer,
    Chunk,
    Clip,
    Comm,
    Dag,
    ElementTypes,
    GradientUse,
    LossKind,
    OrderEdge,
    Overlap,
    Parameter,
    Replication,
    Sharding,
    SplitDim,
    Value,
)
from piper.ops.base import INSTRUCTIONS, WORKS, Instruction, Work
from piper.pausing import collector_paused
from piper.plan.check import plan_problems, program_problems
from piper.plan.model import VERSION, CommunicatorInfo, DevicePlan, Plan, SlotInfo
from piper.reading import decode_json, read_file

if TYPE_CHECKING:
    _AnyWork: TypeAlias = Work
    _AnyInstruction: TypeAlias = Instruction
else:
    _AnyWork = Union[tuple(WORKS.values())]  # noqa: UP007 (a computed union)
    _AnyInstruction = Union[tuple(INSTRUCTIONS.values())]  # noqa: UP007 (a computed union)

T = TypeVar("T")


class _Chunk(Chunk, tag="chunk", frozen=True, forbid_unknown_fields=True):
    work: _AnyWork


class _Comm(Comm, tag="comm", frozen=True, forbid_unknown_fields=True):
    work: _AnyWork


class _Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    device: DeviceId
    slots: tuple[SlotInfo, ...]
    instructions: tuple[_AnyInstruction, ...]


class _Dag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: tuple[_Chunk | _Comm, ...]
    values: tuple[Value, ...]
    bodies: dict[BodyId, Body]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    batch: tuple[BatchLeaf, ...]
    batch_size: int
    batch_symbol: str | None
    captured_size: int
    guards: tuple[str, ...]
    loss_kind: LossKind
    losses: tuple[ValueId, ...]
    weights: tuple[ValueId, ...]
    contributions: dict[str, tuple[ValueId, ...]]
    buffer_updates: dict[str, ValueId]
    order: tuple[OrderEdge, ...]
    splits: tuple[SplitDim, ...]
    replications: tuple[Replication, ...]
    shards: dict[str, tuple[tuple[DeviceId, ...], ...]]
    shardings: tuple[Sharding, ...]
    expert_groups: dict[str, tuple[tuple[DeviceId, ...], ...]]
    directives: tuple[str, ...]
    clip: Clip | None
    gradient_use: GradientUse
    precision: ElementTypes | None
    loss_scaled: bool
    overlaps: tuple[Overlap, ...] = ()


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # In the order in which they are written: see `decode_json`.
    version: int
    num_devices: int
    dag: _Dag
    bindings: dict[str, int]
    microbatch_size: int
    num_microbatches: int
    num_replicas: int
    seed_value: float
    communicators: tuple[CommunicatorInfo, ...]
    roles: tuple[tuple[DeviceId, ...], ...] = ()


class _Version(msgspec.Struct):
    version: int


_SHOWN = 3
"""Problems that an error shows; one mistake often has many consequences."""

_NAMES = ("manifest", "device-")
"""What the names of a plan's files begin with."""

_LISTED = ("nodes", "values", "parameters", "buffers")


def encode_dag(dag: Dag) -> bytes:
    """A DAG as JSON."""
    return msgspec.json.encode(_dag_file(dag))


def decode_dag(data: bytes, *, allow_operators: Collection[str] = ()) -> Dag:
    """The DAG of :func:`encode_dag`'s bytes. Raises :class:`PlanError` if malformed.

    *allow_operators* as for :func:`load_plan`.
    """
    with collector_paused():
        dag = _dag_of(decode_json(data, _Dag, "DAG", PlanError), "DAG")
        _refuse("DAG", dag_problems(dag, allow_operators))
    return dag


def encode_plan(plan: Plan) -> Mapping[str, bytes]:
    """File name → contents: ``manifest.json`` and ``device-0000.json``, ``device-0001.json``, …"""
    manifest = {
        "version": VERSION,
        **{f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "devices"},
        "dag": _dag_file(plan.dag),
    }
    files = {"manifest.json": msgspec.json.encode(manifest)}
    for device in plan.devices:
        contents = {
            "version": VERSION,
            "device": device.device,
            "slots": device.slots,
            "instructions": device.instructions,
        }
        files[_device_file(device.device)] = msgspec.json.encode(contents)
    return files


def decode_plan(files: Mapping[str, bytes], *, allow_operators: Collection[str] = ()) -> Plan:
    """The plan of :func:`encode_plan`'s files. Raises :class:`PlanError` if a file is missing or
    malformed.

    *allow_operators* as for :func:`load_plan`.
    """
    with collector_paused():
        plan = _decode_files(files)
        _refuse("the plan", plan_problems(plan, allow_operators))
        _refuse("the plan", program_problems(plan))
    return plan


def _refuse(what: str, problems: Iterator[str]) -> None:
    """Raise for the first of *problems*, if there are any."""
    shown = list(islice(problems, _SHOWN))
    if shown:
        raise PlanError(f"{what} is malformed: " + "; ".join(shown))


def _decode_files(files: Mapping[str, bytes]) -> Plan:
    manifest = _decode_file(_file(files, "manifest.json"), _Manifest, "manifest.json")
    devices: list[DevicePlan] = []
    for number in range(manifest.num_devices):
        name = _device_file(number)
        device = _decode_file(_file(files, name), _Device, name)
        if device.device != number:
            raise PlanError(f"{name} is the program of device {device.device}")
        devices.append(DevicePlan(device.device, device.slots, device.instructions))
    return Plan(
        num_devices=manifest.num_devices,
        dag=_dag_of(manifest.dag, "manifest.json"),
        bindings=manifest.bindings,
        microbatch_size=manifest.microbatch_size,
        num_microbatches=manifest.num_microbatches,
        num_replicas=manifest.num_replicas,
        seed_value=manifest.seed_value,
        communicators=manifest.communicators,
        devices=tuple(devices),
        roles=manifest.roles,
    )


def wrong_type(plan: Plan) -> str | None:
    """Where *plan*, made in Python, holds a value of another type than its field has; ``None``:
    nowhere.
    """
    try:
        _decode_files(encode_plan(plan))
    except PlanError as error:
        return str(error)
    return None


@public
def save_plan(plan: Plan, folder: str | Path) -> None:
    """Write a plan's files into *folder*, which is made if missing. Raises :class:`PlanError` if
    that is impossible.
    """
    expect(plan, Plan, "save_plan", "piper.plan makes one of a training DAG")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, data in encode_plan(plan).items():
            (path / name).write_bytes(data)
    except OSError as error:
        raise PlanError(f"cannot write a plan into folder {path}: {error.strerror}") from error


@public
def load_plan(folder: str | Path, *, allow_operators: Collection[str] = ()) -> Plan:
    """Read a plan's files. Raises :class:`PlanError` if there are none or they are malformed.

    A plan is data: its chunks may call operators that compute tensors from tensors and numbers, and
    no others. Operators of other libraries, which may do anything, are refused unless one of
    *allow_operators*, shell-style patterns such as ``mylib::*``, names them.
    """
    path = Path(folder)
    try:
        names = sorted(f.name for f in path.glob("*.json") if f.name.startswith(_NAMES))
    except (OSError, ValueError) as error:
        raise PlanError(f"no plan in {path}: {error}") from error
    files = {
        name: read_file(
            path / name, f"cannot read plan file {path / name}", PlanError, follow_links=False
        )
        for name in names
    }
    if "manifest.json" not in files:
        raise PlanError(
            f"no plan in {path}: expected manifest.json and one device-NNNN.json per device"
        )
    return decode_plan(files, allow_operators=allow_operators)


def _device_file(number: int) -> str:
    return f"device-{number:04d}.json"


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise PlanError(
            f"plan file {name} is missing; found {', '.join(sorted(files)) or 'nothing'}"
        )
    return files[name]


def _dag_file(dag: Dag) -> dict[str, object]:
    contents: dict[str, object] = {f.name: getattr(dag, f.name) for f in fields(dag)}
    for name in _LISTED:
        contents[name] = list(getattr(dag, name).values())
    return contents


def _dag_of(file: _Dag, where: str) -> Dag:
    for identity, body in file.bodies.items():
        if (found := body_id(body)) != identity:
            raise PlanError(
                f"the body filed as {identity} has content hash {found}: it was changed"
            )
    contents = {f.name: getattr(file, f.name) for f in fields(Dag)}
    contents["nodes"] = {NodeId(n.id): _plain(n) for n in file.nodes}
    contents["values"] = {ValueId(v.id): v for v in file.values}
    contents["parameters"] = {p.name: p for p in file.parameters}
    contents["buffers"] = {b.name: b for b in file.buffers}
    for name in _LISTED:
        if len(contents[name]) != len(getattr(file, name)):
            raise PlanError(f"{where}: two of the {name} have one number or name")
    return Dag(**contents)


def _plain(node: _Chunk | _Comm) -> Chunk | Comm:
    cls = Chunk if isinstance(node, _Chunk) else Comm
    return cls(**{name: getattr(node, name) for name in cls.__struct_fields__})


def _decode_file(data: bytes, cls: type[T], name: str) -> T:
    """*data* as *cls*, for a file that says its format version: another version is refused as
    such.
    """
    found = decode_json(data, _Version, name, PlanError, whole=False).version
    if found != VERSION:
        raise PlanError(
            f"{name} has format version {found!r:.40}, this piper reads version {VERSION}; plan again with this version"
        )
    return decode_json(data, cls, name, PlanError)
