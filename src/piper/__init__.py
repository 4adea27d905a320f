"""Piper: programmable distributed training for PyTorch.

Annotate regions of a model, state a strategy as directives, and train: see :func:`compile`. Step by step:
:func:`capture`, :func:`apply`, :func:`plan`, :func:`verify`; :func:`check` compares a strategy with single-process training.

Each name is imported when it is first used: ``import piper`` alone loads neither PyTorch nor Ray.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper import errors, schedules
    from piper.api import strategies
    from piper.api.check import CheckReport, check
    from piper.api.compile import compile  # noqa: A004  (users write piper.compile)
    from piper.api.trainer import Trainer, TrainResult
    from piper.capture import annotate, annotate_module, capture
    from piper.directives.order import Order
    from piper.directives.place import Place
    from piper.directives.recompute import Recompute
    from piper.directives.replicate import Replicate
    from piper.directives.shard import Shard
    from piper.directives.split import Split
    from piper.directives.strategy import apply, dump_strategy, load_strategy
    from piper.errors import PiperError
    from piper.plan.codec import load_plan, save_plan
    from piper.planner import plan
    from piper.runtime.grouped import grouped_mm
    from piper.schedules import placements
    from piper.verify import verify

__all__ = [
    "CheckReport",
    "Order",
    "PiperError",
    "Place",
    "Recompute",
    "Replicate",
    "Shard",
    "Split",
    "TrainResult",
    "Trainer",
    "annotate",
    "annotate_module",
    "apply",
    "capture",
    "check",
    "compile",
    "dump_strategy",
    "errors",
    "grouped_mm",
    "load_plan",
    "load_strategy",
    "placements",
    "plan",
    "save_plan",
    "schedules",
    "strategies",
    "verify",
]

_HOMES = {
    "CheckReport": "piper.api.check",
    "Order": "piper.directives.order",
    "PiperError": "piper.errors",
    "Place": "piper.directives.place",
    "Recompute": "piper.directives.recompute",
    "Replicate": "piper.directives.replicate",
    "Shard": "piper.directives.shard",
    "Split": "piper.directives.split",
    "TrainResult": "piper.api.trainer",
    "Trainer": "piper.api.trainer",
    "annotate": "piper.capture",
    "annotate_module": "piper.capture",
    "apply": "piper.directives.strategy",
    "capture": "piper.capture",
    "check": "piper.api.check",
    "compile": "piper.api.compile",
    "dump_strategy": "piper.directives.strategy",
    "grouped_mm": "piper.runtime.grouped",
    "load_plan": "piper.plan.codec",
    "load_strategy": "piper.directives.strategy",
    "plan": "piper.planner",
    "save_plan": "piper.plan.codec",
    "verify": "piper.verify",
}
"""Where each public function and class lives."""

_MODULES = {
    "errors": "piper.errors",
    "placements": "piper.schedules.placements",
    "schedules": "piper.schedules",
    "strategies": "piper.api.strategies",
}
"""Public modules."""


class _Package(ModuleType):
    """This package, its public names loaded on demand."""

    def __getattr__(self, name: str) -> object:
        if name in _MODULES:
            found: object = import_module(_MODULES[name])
        elif name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # Python binds a subpackage in its parent when it is imported; piper.capture, piper.plan and
        # piper.verify are functions whatever was imported before.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
