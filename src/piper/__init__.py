"""Piper: programmable distributed training for PyTorch.

Annotate regions of a model, state a strategy as directives, and train: see :func:`compile`. Step by step:
:func:`capture`, :func:`apply`, :func:`plan`, :func:`verify`; :func:`check` compares a strategy with single-process training.
"""

from piper import errors, schedules
from piper.api import strategies
from piper.api.check import CheckReport, check
from piper.api.compile import compile  # noqa: A004  (users write piper.compile)
from piper.api.trainer import Trainer, TrainResult
from piper.capture import annotate, annotate_module, capture
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply, dump_strategy, load_strategy
from piper.errors import PiperError
from piper.plan.codec import load_plan, save_plan
from piper.planner import plan
from piper.schedules import placements
from piper.verify import verify

__all__ = [
    "CheckReport",
    "Order",
    "PiperError",
    "Place",
    "Replicate",
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
    "load_plan",
    "load_strategy",
    "placements",
    "plan",
    "save_plan",
    "schedules",
    "strategies",
    "verify",
]
