"""Piper: programmable distributed training for PyTorch.

Annotate regions of a model, state a strategy as directives, and train: see :func:`compile`. Step by
step: :func:`capture`, :func:`apply`, :func:`plan`, :func:`verify`, :func:`simulate`,
:func:`visualize`; :func:`check` compares a strategy with single-process training.

Each name is imported when it is first used: ``import piper`` alone loads neither PyTorch nor Ray.

A mistake shows the user's own frames and a message; ``piper.errors.show_internals()`` shows all.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from piper import errors, models, schedules
    from piper.api import strategies
    from piper.api.check import check
    from piper.api.check_report import CheckReport
    from piper.api.compile import compile  # noqa: A004  (users write piper.compile)
    from piper.api.explain import explain
    from piper.api.trainer import Trainer, TrainResult
    from piper.capture import annotate, annotate_module, capture
    from piper.capture.precision import LossScale, Precision
    from piper.directives.offload import Offload
    from piper.directives.order import Order
    from piper.directives.place import Place
    from piper.directives.recompute import Recompute
    from piper.directives.replicate import Replicate
    from piper.directives.shard import Shard
    from piper.directives.split import Split
    from piper.directives.strategy import apply, dump_strategy, load_strategy
    from piper.errors import PiperError, PiperWarning
    from piper.plan.codec import load_plan, save_plan
    from piper.plan.costs import Hardware, UnitCosts, hardware
    from piper.plan.profile import Profile, load_profile
    from piper.plan.topology import Link, Topology
    from piper.planner import plan
    from piper.runtime.checkpoint.reader import Checkpoint
    from piper.runtime.grouped import grouped_mm
    from piper.schedules import placements
    from piper.simulate import simulate
    from piper.simulate.timeline import Timeline, load_timeline
    from piper.verify import verify
    from piper.visualize.picture import visualize

__all__ = [
    "CheckReport",
    "Checkpoint",
    "Hardware",
    "Link",
    "LossScale",
    "Offload",
    "Order",
    "PiperError",
    "PiperWarning",
    "Place",
    "Precision",
    "Profile",
    "Recompute",
    "Replicate",
    "Shard",
    "Split",
    "Timeline",
    "Topology",
    "TrainResult",
    "Trainer",
    "UnitCosts",
    "annotate",
    "annotate_module",
    "apply",
    "capture",
    "check",
    "compile",
    "dump_strategy",
    "errors",
    "explain",
    "grouped_mm",
    "hardware",
    "load_plan",
    "load_profile",
    "load_strategy",
    "load_timeline",
    "models",
    "placements",
    "plan",
    "save_plan",
    "schedules",
    "simulate",
    "strategies",
    "verify",
    "visualize",
]

_HOMES = {
    "CheckReport": "piper.api.check_report",
    "Checkpoint": "piper.runtime.checkpoint.reader",
    "Hardware": "piper.plan.costs",
    "Link": "piper.plan.topology",
    "LossScale": "piper.capture.precision",
    "Offload": "piper.directives.offload",
    "Order": "piper.directives.order",
    "PiperError": "piper.errors",
    "PiperWarning": "piper.errors",
    "Place": "piper.directives.place",
    "Precision": "piper.capture.precision",
    "Profile": "piper.plan.profile",
    "Recompute": "piper.directives.recompute",
    "Replicate": "piper.directives.replicate",
    "Shard": "piper.directives.shard",
    "Split": "piper.directives.split",
    "Timeline": "piper.simulate.timeline",
    "Topology": "piper.plan.topology",
    "TrainResult": "piper.api.trainer",
    "Trainer": "piper.api.trainer",
    "UnitCosts": "piper.plan.costs",
    "annotate": "piper.capture",
    "annotate_module": "piper.capture",
    "apply": "piper.directives.strategy",
    "capture": "piper.capture",
    "check": "piper.api.check",
    "compile": "piper.api.compile",
    "dump_strategy": "piper.directives.strategy",
    "explain": "piper.api.explain",
    "grouped_mm": "piper.runtime.grouped",
    "hardware": "piper.plan.costs",
    "load_plan": "piper.plan.codec",
    "load_profile": "piper.plan.profile",
    "load_strategy": "piper.directives.strategy",
    "load_timeline": "piper.simulate.timeline",
    "plan": "piper.planner",
    "save_plan": "piper.plan.codec",
    "simulate": "piper.simulate",
    "verify": "piper.verify",
    "visualize": "piper.visualize.picture",
}
"""Where each public function and class lives."""

_MODULES = {
    "errors": "piper.errors",
    "models": "piper.models",
    "placements": "piper.schedules.placements",
    "schedules": "piper.schedules",
    "strategies": "piper.api.strategies",
}
"""Public modules."""

_INSIDE = {
    "models": (
        "MLP",
        "MLPConfig",
        "MoE",
        "MoEConfig",
        "Multi",
        "MultiConfig",
        "Transformer",
        "TransformerConfig",
        "UNet",
        "UNetConfig",
        "generate",
        "huggingface",
        "mlp_loss",
        "moe_loss",
        "multi_loss",
        "transformer_loss",
        "unet_loss",
    ),
    "placements": ("chain", "looped", "two_way", "v_shape"),
    "schedules": (
        "SCHEDULES",
        "Schedule",
        "dualpipe",
        "dualpipev",
        "gpipe",
        "interleaved_one_f_one_b",
        "interleaved_zero_bubble",
        "looped_bfs",
        "one_f_one_b",
        "zb_h1",
        "zbv",
    ),
    "strategies": ("pipeline",),
}
"""What is one module further in, for who looks for it here: to import the modules would load
PyTorch.
"""


def _elsewhere(name: str) -> str:
    """Where there is something of that name, or of one near it, for an error message."""
    if name.startswith("_"):
        return ""
    classes = import_module("piper.errors")
    inside = {known: module for module, names in _INSIDE.items() for known in names}
    inside |= {known: "errors" for known in vars(classes) if known.endswith("Error")}
    if name in inside:
        return f"; it is piper.{inside[name]}.{name}"
    known = classes.closest(name, (*inside, *__all__), cutoff=0.7)
    return f"; did you mean piper.{inside[known]}.{known}?" if known in inside else ""


class _Package(ModuleType):
    """This package, its public names loaded on demand."""

    def __getattr__(self, name: str) -> object:
        if name in _MODULES:
            found: object = import_module(_MODULES[name])
        elif name in _HOMES:
            found = getattr(import_module(_HOMES[name]), name)
        else:
            text = f"module {self.__name__!r} has no attribute {name!r}{_elsewhere(name)}"
            try:
                # With `name` and `obj`, Python says which name is near.
                raise AttributeError(text, name=name, obj=self)  # noqa: TRY301
            except AttributeError as error:
                error.__traceback__ = None  # the user's own frame is the one that says where
                raise
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # Python binds a subpackage in its parent when it is imported; piper.capture, piper.plan,
        # piper.simulate and piper.verify are functions whatever was imported before.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
