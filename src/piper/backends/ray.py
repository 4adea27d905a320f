"""Every device a Ray actor: a process of this machine, or of a cluster. The driver is the central
scheduler.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias, cast

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from piper.backends.failures import Failure, failure_of, root_cause
from piper.backends.workers import WorkerBackend
from piper.boundary import public, users_line
from piper.devices.cpu import CpuDevice
from piper.devices.gloo import DEFAULT_TIMEOUT, GlooCommunicator
from piper.devices.heap import keep_freed_memory
from piper.errors import ConfigError, RunError, internals_shown, show_internals
from piper.ids import DeviceId
from piper.ops.base import Communicator, CommunicatorId
from piper.runtime.worker import Worker

_LOGGER = logging.getLogger("piper")

_GRACE = 0.5
"""Seconds that the other workers get to report, once a real cause is known."""

_SEARCH = 8.0
"""Seconds to wait for the real cause when a worker only lost its peer. (Ray notices a death within
about a second.)
"""

_PLACEMENT = 60.0
"""Seconds within which the cluster must give the workers their places."""


_SILENCE = 3.0
"""Seconds of waiting for places after which that is said."""

_PLACES = "piper_places"
"""The resource that counts devices in a Ray that piper started: as many trainers as the user likes
can be open in it. Elsewhere devices are counted in CPUs, as other jobs' are.
"""

_UNBOUNDED = 1e6


@dataclass(slots=True)
class _Started:
    """The Ray that piper started or connected to in this process, for as long as a backend uses it."""

    session: str | None = None
    local: bool = False
    users: set[int] = field(default_factory=set)


_STARTED = _Started()


@dataclass(frozen=True, slots=True)
class _Holding:
    """What an open backend holds of a Ray, and how to name it to the user."""

    session: str
    cpus: float
    name: str


_OPEN: dict[int, _Holding] = {}
"""The open backends of this process."""

_LOCK = threading.RLock()
"""Held while backends come and go. (A backend may go by garbage collection, so at any place.)"""


_Ref: TypeAlias = "ray.ObjectRef[object]"


class _Actor:
    """The process of one device. Its methods report failures as data: not every exception survives
    pickling.
    """

    def __init__(
        self, rank: int, world_size: int, threads: int, timeout: float, internals: bool
    ) -> None:
        show_internals(internals)  # as the driver does
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._rank, self._world_size = rank, world_size
        self._timeout = timeout
        self._host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's own
        self._store: Store | None = None
        self._worker: Worker | None = None

    def serve(self) -> tuple[str, int]:
        """Start the store over which all meet; its address."""
        store = TCPStore(
            self._host, 0, is_master=True, wait_for_workers=False, timeout=self._limit()
        )
        self._store = store
        return self._host, store.port

    def join(self, host: str, port: int) -> None:
        """Connect to the store and become a worker."""
        if self._store is None:
            self._store = TCPStore(host, port, is_master=False, timeout=self._limit())
        self._worker = Worker(self._rank, self._world_size, CpuDevice, self._communicator)

    def call(self, method: str, **arguments: object) -> object:
        """Call the worker; the result, or a :class:`Failure`."""
        try:
            return getattr(self._worker, method)(**arguments)
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            return failure_of(self._rank, error)

    def _limit(self) -> timedelta:
        return timedelta(seconds=self._timeout)

    def _communicator(self, name: CommunicatorId, members: tuple[DeviceId, ...]) -> Communicator:
        assert self._store is not None
        return GlooCommunicator(
            name,
            members,
            DeviceId(self._rank),
            self._store,
            host=self._host,
            timeout=self._timeout,
        )


@public
class RayBackend(WorkerBackend):
    """Implements :class:`~piper.backends.base.Backend` with one actor per device in a placement
    group.

    *address* is a Ray cluster's (``"auto"``: the one of this machine); ``RAY_ADDRESS`` stands in
    for it. A Ray that the program has initialised is used in any case, and left running. Without an
    address a local one is started, without dashboard, for as long as any backend of this process
    uses it. In a local Ray that was started so, more devices than cores can be tried, and several
    backends be open at once; they share the cores, which is logged.

    *threads* is the number of threads that one device computes with (default: this machine's cores
    divided among the devices). *cpus_per_device* is what each actor asks the cluster for. *timeout*
    (seconds) bounds every wait for a peer. *worker_logs* shows what the workers print.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        threads: int | None = None,
        cpus_per_device: float = 1.0,
        timeout: float = DEFAULT_TIMEOUT,
        worker_logs: bool = False,
    ) -> None:
        super().__init__()
        self._address = address
        self._threads = threads
        self._cpus = cpus_per_device
        self._timeout = timeout
        self._worker_logs = worker_logs
        self._session: str | None = None  # which Ray the actors are in
        self._resource = "CPU"
        self._group: PlacementGroup | None = None
        self._actors: list[ActorHandle[_Actor]] = []

    def _start(self, num_devices: int) -> None:
        atexit.register(self._stop)
        with _LOCK:
            if not ray.is_initialized():
                self._init_ray(num_devices)
            self._session = _current_session()
            local = self._session == _STARTED.session and _STARTED.local
            if self._session == _STARTED.session:
                _STARTED.users.add(id(self))
        self._resource = _PLACES if local else "CPU"
        self._check_capacity(num_devices, local=local)
        group = self._place(num_devices)
        try:
            self._start_actors(group, num_devices)
        except RayError as error:
            raise RunError(f"the workers could not be started: {error}") from error

    def _start_actors(self, group: PlacementGroup, num_devices: int) -> None:
        threads = self._threads or max(1, (os.cpu_count() or 1) // num_devices)
        actor = ray.remote(_Actor)
        for rank in range(num_devices):
            options = actor.options(
                num_cpus=self._cpus if self._resource == "CPU" else 0,
                resources=None if self._resource == "CPU" else {self._resource: self._cpus},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            )
            handle = options.remote(rank, num_devices, threads, self._timeout, internals_shown())
            self._actors.append(cast("ActorHandle[_Actor]", handle))
        host, port = _address(ray.get(self._actors[0].serve.remote()))
        ray.get([actor.join.remote(host, port) for actor in self._actors])

    def _init_ray(self, num_devices: int) -> None:
        address = self._address or os.environ.get("RAY_ADDRESS")
        if address is not None:
            ray.init(
                address=address,
                logging_level=logging.ERROR,
                log_to_driver=self._worker_logs,
            )
        else:
            cores = os.cpu_count() or 1
            if num_devices > cores:
                _LOGGER.warning(
                    "%d devices share this machine's %d cores: good for trying, not for speed",
                    num_devices,
                    cores,
                )
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address="local",
                num_cpus=max(cores, num_devices),
                resources={_PLACES: _UNBOUNDED},
                include_dashboard=False,
                logging_level=logging.ERROR,
                log_to_driver=self._worker_logs,
            )
        _STARTED.session, _STARTED.local = _current_session(), address is None
        _STARTED.users = set()

    def _check_capacity(self, num_devices: int, *, local: bool) -> None:
        cpus = _cpus(ray.cluster_resources())  # type: ignore[no-untyped-call]  # Ray's own
        if local:
            cpus = max(cpus, num_devices)  # they share the cores
        if cpus < num_devices * self._cpus:
            raise ConfigError(
                f"the plan needs {num_devices} devices of {self._cpus:g} CPUs each, but the Ray cluster has {cpus:g} CPUs in "
                f"all; use fewer devices, add nodes, or pass cpus_per_device={cpus / num_devices:.2g} to let devices share"
            )
        with _LOCK:
            others = [
                (held.cpus, held.name) for held in _OPEN.values() if held.session == self._session
            ]
            if not local and cpus - sum(held for held, _ in others) < num_devices * self._cpus:
                raise ConfigError(
                    f"the plan needs {num_devices} devices of {self._cpus:g} CPUs each, and the Ray cluster has {cpus:g}, of which "
                    f"{sum(held for held, _ in others):g} are held by what this process has open: {'; '.join(name for _, name in others)}. "
                    "Close it first (trainer.close()), or use fewer devices"
                )
            _OPEN[id(self)] = _Holding(
                self._session or "",
                num_devices * self._cpus,
                f"the trainer on {num_devices} devices that was made at {users_line()}",
            )

    def _place(self, num_devices: int) -> PlacementGroup:
        group: PlacementGroup = placement_group(
            [{self._resource: self._cpus}] * num_devices, strategy="PACK"
        )
        self._group = group
        ready = group.ready()
        if not ray.wait([ready], timeout=_SILENCE)[0]:
            _LOGGER.warning(
                "waiting up to %g s for %d places of %g CPUs in the Ray cluster, which other jobs hold",
                _PLACEMENT,
                num_devices,
                self._cpus,
            )
        try:
            ray.get(ready, timeout=_PLACEMENT - _SILENCE)
        except GetTimeoutError:
            free = _cpus(ray.available_resources())  # type: ignore[no-untyped-call]  # Ray's own
            raise ConfigError(
                f"the Ray cluster did not give {num_devices} places of {self._cpus:g} CPUs within {_PLACEMENT:g} s; "
                f"{free:g} CPUs are free: wait for other jobs to end, or use fewer devices"
            ) from None
        return group

    def _share(self, value: object) -> object:
        self._require_session()  # Ray starts by itself where it is asked for something
        return ray.put(value)

    def _require_session(self) -> None:
        if self._session is None or _current_session() != self._session:
            raise RunError(
                "the Ray that the workers were in has ended (ray.shutdown() was called, or the cluster is gone), and they with it; "
                "compile a new trainer, and go on from a checkpoint"
            )

    def _call(self, method: str, arguments: Sequence[Mapping[str, object]]) -> list[object]:
        self._require_session()
        pending: dict[_Ref, int] = {
            actor.call.remote(method, **keywords): rank
            for rank, (actor, keywords) in enumerate(zip(self._actors, arguments, strict=True))
        }
        results: list[object] = [None] * len(pending)
        failures: list[Failure] = []
        deadline = float("inf")
        while pending and time.monotonic() < deadline:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=0.2 if failures else 1.0)
            for ref in ready:
                rank = pending.pop(ref)
                results[rank] = _result(ref, rank)
                if isinstance(failure := results[rank], Failure):
                    failures.append(failure)
                    patience = _GRACE if root_cause(failures).rank == 0 else _SEARCH
                    deadline = min(deadline, time.monotonic() + patience)
        if failures:
            raise root_cause(failures).error()
        return results

    def _stop(self) -> None:
        atexit.unregister(self._stop)
        with _LOCK:
            actors, self._actors = self._actors, []
            group, self._group = self._group, None
            session, self._session = self._session, None
            _OPEN.pop(id(self), None)
            there = session is not None and _current_session() == session
            if there:
                for actor in actors:
                    ray.kill(actor)
                if group is not None:
                    remove_placement_group(group)
            if session is None or session != _STARTED.session:
                return
            _STARTED.users.discard(id(self))
            if not _STARTED.users:
                _STARTED.session = None
                if there:
                    ray.shutdown()


def _current_session() -> str | None:
    """Which Ray this process is connected to, if any."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def _address(served: object) -> tuple[str, int]:
    assert isinstance(served, tuple)
    host, port = served
    return host, port


def _cpus(resources: Mapping[str, float]) -> float:
    return resources.get("CPU", 0.0)


def _result(ref: _Ref, rank: int) -> object:
    """What the worker returned, or the report of its death."""
    try:
        return ray.get(ref)
    except RayActorError as error:
        return Failure(rank, RunError, f"device {rank}: its worker process died: {_reason(error)}")


def _reason(error: RayActorError) -> str:
    """The part of Ray's report that says how; its list of common causes is long and general."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if "exit detail" in line.lower()), lines[-1])
    return (
        f"{reason.partition(' Some common causes')[0]} It was killed, ran out of memory, or crashed in native code: see "
        f"the workers' logs in Ray's session folder (/tmp/ray/session_latest/logs)"
    )
