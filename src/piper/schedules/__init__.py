"""Schedules and placements: pure functions that return directives, and examples of writing one.

A schedule is one :class:`~piper.directives.order.Order` per rank: the sequence of that rank's
chunks. Communication follows data, so nothing else is needed. Placements say which device group
each stage is on.
"""

from piper.schedules.base import SCHEDULES, Schedule
from piper.schedules.dualpipe import dualpipe, dualpipev
from piper.schedules.gpipe import gpipe
from piper.schedules.interleaved import interleaved_one_f_one_b
from piper.schedules.looped_bfs import looped_bfs
from piper.schedules.one_f_one_b import one_f_one_b
from piper.schedules.placements import chain, looped, two_way, v_shape
from piper.schedules.zero_bubble import interleaved_zero_bubble, zb_h1, zbv

__all__ = [
    "SCHEDULES",
    "Schedule",
    "chain",
    "dualpipe",
    "dualpipev",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped",
    "looped_bfs",
    "one_f_one_b",
    "two_way",
    "v_shape",
    "zb_h1",
    "zbv",
]
