"""Which operators a body may call.

A body is data that becomes code, and it may come from a file, so that it must be known what its
operators do. An operator's schema does not say it all: ``aten.from_file`` has a functional one. So
there is a list by name, made from the schemas and a list of exceptions
(``tests/support/operators.py``): operators that compute tensors from tensors and numbers, and
nothing else. Operators of other namespaces may only be called where who loads or verifies a plan
says so.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files

from piper.ir.body import GETITEM, Body

OWN = frozenset({"piper.grouped_mm.default", "piper.grouped_outer.default"})
"""Our own operators (``piper/runtime/grouped.py``)."""

NAMESPACES = frozenset({"aten", "prims", "piper", "operator"})
"""Namespaces of which only listed operators may be called, whatever is allowed besides."""

ALL = ("*",)
"""Allows the operators of every other library."""

_TARGET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){2}")


@cache
def _listed() -> Mapping[str, bool]:
    """The listed operators, with overloads; whether each draws random numbers."""
    found = {GETITEM: False, **dict.fromkeys(OWN, False)}
    random = False
    for line in (files("piper.ir") / "operators.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("["):
            random = line == "[random]"
            continue
        name, *overloads = line.split()
        found.update((f"{name}.{overload}", random) for overload in overloads)
    return found


def refusal(target: str, allowed: Collection[str] = ()) -> str | None:
    """Why a body may not call *target*, a name with namespace and overload; ``None``: it may.

    *allowed* are shell-style patterns of operators of other libraries: ``mylib::*``, or
    ``mylib.op.default``.
    """
    if target in _listed():
        return None
    if not is_operator_name(target):
        return f"{target!r:.80} is not the name of an operator, such as 'aten.mm.default'"
    if target.partition(".")[0] in NAMESPACES:
        return f"operator {target!r} is not one of those that only compute tensors from tensors and numbers"
    if any(fnmatchcase(target, pattern.replace("::", ".")) for pattern in allowed):
        return None
    return (
        f"operator {target!r} is of another library, and may do anything; if you trust it, list it: "
        f'allow_operators=["{target.partition(".")[0]}::*"]'
    )


def is_operator_name(target: str) -> bool:
    """Whether *target* could be a namespace, a name and an overload."""
    return _TARGET.fullmatch(target) is not None


def is_random(target: str) -> bool | None:
    """Whether operator *target* draws random numbers; ``None`` for one that is not listed."""
    return _listed().get(target)


def foreign_operators(bodies: Iterable[Body]) -> tuple[str, ...]:
    """The operators of other libraries that *bodies* call: what to allow if these are trusted."""
    names = {call.target for body in bodies for call in body.calls}
    return tuple(
        sorted(n for n in names if n not in _listed() and n.partition(".")[0] not in NAMESPACES)
    )
