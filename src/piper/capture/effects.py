"""Operators that do something besides computing: look at a result and raise an error, print."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx
from torch._higher_order_ops.effects import with_effects
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from piper.capture.explain import user_line
from piper.errors import CaptureError, PiperError

_CHECK = "aten._linalg_check_errors"


@dataclass(frozen=True, slots=True)
class Effect:
    """A call with an effect; ``caller`` is the function that checks its result by it, if any."""

    operator: str
    caller: str

    def refused(self, where: str) -> CaptureError:
        """Why it cannot be part of a step, and what to call instead. *where*: the user's line."""
        place = f"{where}: " if where else ""
        if self.operator.startswith(_CHECK):
            return CaptureError(
                f"{place}torch.{self.caller} looks at its result on the host and raises an error for a matrix that it cannot take (singular, not "
                f"positive definite), which a planned step cannot do. Call torch.{self.caller}_ex, which returns the result and an info tensor"
            )
        return CaptureError(
            f"{place}{self.operator} does something besides computing (it checks, prints, or changes something outside), which a planned step "
            "does not repeat. Call it outside of the model and the loss, or use an operator without that effect"
        )


def find_effect(graph: torch.fx.Graph) -> Effect | None:
    """The first effect in a traced graph."""
    for node in graph.find_nodes(op="call_function", target=with_effects):
        caller = next((arg for arg in node.args[2:] if isinstance(arg, str)), "")
        return Effect(str(node.args[1]), caller.removeprefix("torch."))
    return None


class _SeenError(PiperError):
    """Raised where an operator is called, for the sake of its traceback."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """While it is entered, a call of *operator* ends what runs; :func:`line_of` says where."""

    def __init__(self, operator: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._operator = operator

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if str(func) == self._operator:
            raise _SeenError
        return func(*args, **(kwargs or {}))


def line_of(error: PiperError) -> str:
    """The user's line that made a :class:`Watch` end a run; empty if *error* is another."""
    return user_line(error.__traceback__, default="") if isinstance(error, _SeenError) else ""
