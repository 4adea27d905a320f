"""Local work of hosts that block, at the pace that communication leaves it: see
:class:`~piper.plan.topology.Contention`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from piper.ids import DeviceId
from piper.plan.topology import Contention

Foresee = Callable[[float, DeviceId, int], None]
"""Called with the time at which a device's work will be over at its present pace, and the number of
this forecast.
"""


@dataclass(slots=True)
class _Work:
    """What a host is doing: which instruction, what kind of event its end is, full-speed seconds
    that are left.
    """

    place: int
    kind: int
    left: float
    since: float
    pace: float = 0.0


class Hosts:
    """One piece of work per device at most. *foresee* is told when it will be over; only the last
    forecast of a device holds.
    """

    def __init__(self, contention: Contention, foresee: Foresee) -> None:
        self._contention, self._foresee = contention, foresee
        self._works: dict[DeviceId, _Work] = {}
        self._flows: dict[DeviceId, int] = {}
        self._forecasts: dict[DeviceId, int] = {}

    def begin(self, device: DeviceId, place: int, kind: int, seconds: float, now: float) -> None:
        """*device* begins work that takes *seconds* by itself."""
        self._works[device] = _Work(place, kind, seconds, now)
        self._pace(device, now)

    def end(self, device: DeviceId, forecast: int) -> tuple[int, int] | None:
        """Place and kind of the work that is over; ``None`` if the forecast no longer holds."""
        if self._forecasts.get(device) != forecast or device not in self._works:
            return None
        work = self._works.pop(device)
        return work.place, work.kind

    def communicate(self, devices: Iterable[DeviceId], change: int, now: float) -> None:
        """From *now* on, *change* (1 or -1) more flows are under way at each of *devices*."""
        for device in devices:
            self._flows[device] = self._flows.get(device, 0) + change
            if device in self._works:
                self._pace(device, now)

    def traffic(self, devices: Iterable[DeviceId]) -> float:
        """The fraction of its speed at which a flow between *devices* goes."""
        return 1.0 if self._works.keys().isdisjoint(devices) else self._contention.traffic

    def _pace(self, device: DeviceId, now: float) -> None:
        work = self._works[device]
        pace = self._contention.work if self._flows.get(device) else 1.0
        if pace == work.pace:
            return
        work.left -= work.pace * (now - work.since)
        work.pace, work.since = pace, now
        number = self._forecasts[device] = self._forecasts.get(device, 0) + 1
        self._foresee(now + max(0.0, work.left) / pace, device, number)
