"""What no picture can show."""

import math

from piper.errors import PictureError
from piper.simulate.timeline import Box, DeviceTimeline, Timeline


def check_drawable(timeline: Timeline, name: str) -> None:
    """Raise :class:`~piper.errors.PictureError` unless *timeline*, called *name*, takes time, and
    all its boxes and counts are finite.
    """
    if not any(True for device in timeline.devices for _ in device.boxes()):
        raise PictureError(f"{name} has no boxes: there is nothing to draw")
    for device in timeline.devices:
        for box in device.boxes():
            if (problem := _problem(box)) is not None:
                raise PictureError(f"{name}: {_where(device, box)} {problem}; look at the costs")
    if not 0 < timeline.seconds < math.inf:
        raise PictureError(
            f"{name} takes {timeline.seconds:g} s: expected more than 0, and finite; look at the costs"
        )
    if not math.isfinite(timeline.flops) or not math.isfinite(timeline.mfu or 0.0):
        raise PictureError(
            f"{name}: expected finite counts, found {timeline.flops:g} FLOPs and MFU {timeline.mfu}"
        )


def _problem(box: Box) -> str | None:
    if not -math.inf < box.start <= box.end < math.inf:
        return f"runs from {box.start:g} s to {box.end:g} s"
    if not math.isfinite(box.flops):
        return f"counts {box.flops:g} FLOPs"
    return None


def _where(device: DeviceTimeline, box: Box) -> str:
    return f"{box.label!r} on device {device.device}, instruction {box.position},"
