"""Python state that a model's forward can read and change: what tracing freezes.

Looked at are attributes of modules (numbers, texts, containers, tensors and arrays, generators of
random numbers, objects with attributes of their own), and of the user's own classes and functions
class attributes, cells of closures and global variables that their code names; the same of the loss
function; and the global states of ``random`` and ``numpy.random``. Not looked at are parameters and
buffers (which every run has copies of), hooks, state inside extension types, and what libraries
keep to themselves.
"""

import hashlib
import random
import sys
from collections import deque
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from types import CellType, FunctionType, MethodType

import numpy as np
import torch
from torch import nn

from piper.capture.explain import is_user_file

MOST_VALUES = 100_000
"""Values that are looked at in one place, at most."""

DEEPEST = 12
"""Nesting that is looked at."""


class Kind(StrEnum):
    """What a place holds."""

    ATTRIBUTE = "attribute"
    RANDOM = "random"


@dataclass(slots=True)
class Seen:
    """A place at one time: a *token* of its value (equal tokens: equal values), how it reads, and
    what puts it back.
    """

    token: tuple[Hashable, ...]
    text: str
    kind: Kind
    undo: list[Callable[[], None]] = field(default_factory=list)


class State:
    """All places at one time."""

    def __init__(self, seen: Mapping[str, Seen], spaces: "Sequence[_Space]") -> None:
        self.seen, self._spaces = seen, spaces

    def changed(self, later: "State") -> list[str]:
        """Names of the places whose value is another one *later*."""
        names = {**self.seen, **later.seen}
        return [n for n in names if self._token(n) != later._token(n)]  # noqa: SLF001

    def _token(self, name: str) -> object:
        seen = self.seen.get(name)
        return None if seen is None else seen.token

    def restore(self) -> None:
        """Put everything back."""
        for space in self._spaces:
            space.restore()
        for seen in self.seen.values():
            for undo in seen.undo:
                undo()

    def restore_only(self, names: Container[str]) -> None:
        """Put back the places *names* alone."""
        for space in self._spaces:
            space.restore(names)
        for name, seen in self.seen.items():
            if name in names:
                for undo in seen.undo:
                    undo()


@dataclass(frozen=True, slots=True)
class _Space:
    """The entries of one namespace, by place name."""

    space: MutableMapping[str, object]
    entries: Mapping[str, tuple[str, object]]

    def restore(self, names: Container[str] | None = None) -> None:
        for name, (key, value) in self.entries.items():
            if (names is None or name in names) and self.space.get(key, _ABSENT) is not value:
                self.space[key] = value
        if names is None:
            kept = {key for key, _ in self.entries.values()}
            for key in [k for k in self.space if k not in kept and k not in _OF_MODULES]:
                del self.space[key]


_ABSENT = object()


class Watch:
    """Looks at the state of a model and its loss function."""

    def __init__(self, model: nn.Module, loss_fn: object) -> None:
        self._model, self._loss_fn = model, loss_fn

    def look(self) -> State:
        """Everything as it is now."""
        registered = self._registered()
        seen: dict[str, Seen] = {}
        spaces: list[_Space] = []
        for space, names in self._spaces():
            entries = {name: (key, space[key]) for key, name in names.items()}
            spaces.append(_Space(space, entries))
            for key, name in names.items():
                seen[name] = _Walk(registered).look(space[key])
        return State(seen, spaces)

    def token(self, name: str) -> object:
        """The token of one place now; ``None`` where there is no such place."""
        found = self._find(name)
        return None if found is _ABSENT else _Walk(self._registered()).look(found).token

    def put(self, name: str, value: object) -> None:
        """Put *value* in a place that is there."""
        for space, names in self._spaces():
            for key, own in names.items():
                if own == name:
                    space[key] = value

    def value(self, name: str) -> object:
        """What is in one place now; ``None`` where there is no such place."""
        found = self._find(name)
        return None if found is _ABSENT else found

    def _find(self, name: str) -> object:
        for space, names in self._spaces():
            for key, own in names.items():
                if own == name:
                    return space[key]
        return _ABSENT

    def _registered(self) -> set[int]:
        modules = set(map(id, self._model.modules()))
        tensors = (*self._model.parameters(), *self._model.buffers())
        return modules.union(map(id, tensors))

    def _spaces(self) -> Iterator[tuple[MutableMapping[str, object], dict[str, str]]]:
        """Namespaces, and the names of the places in them by key."""
        yield _RANDOM, {key: key for key in _RANDOM}
        for path, module in self._model.named_modules():
            prefix = f"{path}." if path else ""
            space = vars(module)
            yield space, {k: f"{prefix}{k}" for k in space if k not in _OF_MODULES}
        classes = dict.fromkeys(c for m in self._model.modules() for c in type(m).__mro__)
        held = (v for m in self._model.modules() for v in vars(m).values())
        functions = [f for f in map(_function, held) if f is not None]
        for cls in classes:
            if not _is_users(cls):
                continue
            own = [f for f in map(_function, vars(cls).values()) if f is not None]
            functions += [f for f in own if is_user_file(f.__code__.co_filename)]
            yield (
                _ClassSpace(cls),
                {
                    key: f"{cls.__name__}.{key}"
                    for key, value in vars(cls).items()
                    if not key.startswith("__") and _is_data(value)
                },
            )
        yield from self._of_loss(functions)
        yield from _of_functions(functions)

    def _of_loss(
        self, functions: list[FunctionType]
    ) -> Iterator[tuple[MutableMapping[str, object], dict[str, str]]]:
        loss = self._loss_fn
        while isinstance(loss, partial):
            loss = loss.func
        if (function := _function(loss)) is not None:
            if is_user_file(function.__code__.co_filename):
                functions.append(function)
            loss = loss.__self__ if isinstance(loss, MethodType) else None
        modules = loss.named_modules() if isinstance(loss, nn.Module) else [("", loss)]
        for path, owner in modules:
            space = getattr(owner, "__dict__", None)
            if isinstance(space, dict) and not isinstance(owner, type):
                prefix = f"loss_fn.{path}." if path else "loss_fn."
                yield space, {k: f"{prefix}{k}" for k in space if k not in _OF_MODULES}


_OF_MODULES = frozenset(vars(nn.Module()).keys()) - {"training"}
"""Attributes of every module: parameters, buffers, modules, hooks."""


class _GlobalRandom(MutableMapping[str, object]):
    """The global generators that models draw from besides torch's."""

    _KEYS = ("random (Python's)", "numpy.random")

    def __getitem__(self, key: str) -> object:
        if key == self._KEYS[0]:
            return random._inst  # noqa: SLF001 (what random.random is a method of)
        return np.random.mtrand._rand  # noqa: SLF001

    def __setitem__(self, key: str, value: object) -> None:
        raise AssertionError("the generators are put back, not replaced")

    def __delitem__(self, key: str) -> None:
        raise AssertionError("the generators stay")

    def __iter__(self) -> Iterator[str]:
        return iter(self._KEYS)

    def __len__(self) -> int:
        return len(self._KEYS)


_RANDOM = _GlobalRandom()


class _ClassSpace(MutableMapping[str, object]):
    """The attributes of a class."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __getitem__(self, key: str) -> object:
        return vars(self._cls)[key]

    def __setitem__(self, key: str, value: object) -> None:
        setattr(self._cls, key, value)

    def __delitem__(self, key: str) -> None:
        if not key.startswith("__") and _is_data(self[key]):
            delattr(self._cls, key)

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in vars(self._cls) if not key.startswith("__")])

    def __len__(self) -> int:
        return len(vars(self._cls))


class _Cells(MutableMapping[str, object]):
    """The filled cells of a function's closure, by name."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells: dict[str, CellType] = {n: c for n, c in cells if _is_filled(c)}

    def __getitem__(self, key: str) -> object:
        contents: object = self._cells[key].cell_contents
        return contents

    def __setitem__(self, key: str, value: object) -> None:
        self._cells[key].cell_contents = value

    def __delitem__(self, key: str) -> None:
        """Cells stay."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class _Globals(MutableMapping[str, object]):
    """The global variables with data that a function's code names."""

    def __init__(self, function: FunctionType) -> None:
        self._globals = function.__globals__
        named = function.__code__.co_names
        self._names = [n for n in named if n in self._globals and _is_data(self._globals[n])]

    def __getitem__(self, key: str) -> object:
        value: object = self._globals[key]
        return value

    def __setitem__(self, key: str, value: object) -> None:
        self._globals[key] = value

    def __delitem__(self, key: str) -> None:
        """Globals stay."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _of_functions(
    functions: list[FunctionType],
) -> Iterator[tuple[MutableMapping[str, object], dict[str, str]]]:
    """Cells and globals of *functions*, and of the user's functions that those name."""
    known = {id(f) for f in functions}
    taken: set[str] = set()
    queue = list(functions)
    while queue:
        function = queue.pop()
        cells, names = _Cells(function), _Globals(function)
        where = function.__qualname__
        yield cells, {k: f"{k} (closure of {where})" for k in cells if _is_data(cells[k])}
        fresh = [k for k in names if f"{function.__module__}.{k}" not in taken]
        taken.update(f"{function.__module__}.{k}" for k in fresh)
        yield names, {k: f"{k} (global of {function.__module__})" for k in fresh}
        for value in (*cells.values(), *_named(function)):
            found = _function(value)
            if found is None or id(found) in known or len(known) >= 1000:
                continue
            known.add(id(found))
            if is_user_file(found.__code__.co_filename):
                queue.append(found)


def _named(function: FunctionType) -> Iterator[object]:
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield function.__globals__[name]


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises if there is nothing)
    except ValueError:
        return False
    return True


def _function(value: object) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def _is_users(cls: type) -> bool:
    function = next((f for f in map(_function, vars(cls).values()) if f is not None), None)
    return function is not None and is_user_file(function.__code__.co_filename)


_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_DATA = (*_ATOMS, *_GENERATORS, list, tuple, dict, set, deque, torch.Tensor, np.ndarray)


def _is_data(value: object) -> bool:
    """Whether *value* is looked at where a function or a class refers to it: data, and objects of
    the user's own classes that are no modules.
    """
    if isinstance(value, _DATA):
        return True
    home = sys.modules.get(type(value).__module__)
    file = getattr(home, "__file__", None)
    users = home is sys.modules.get("__main__") or (file is not None and is_user_file(file))
    return users and _is_object(value) and not isinstance(value, nn.Module)


class _Walk:
    """Looks at values, each object once."""

    def __init__(self, registered: Container[int]) -> None:
        self._registered = registered
        self._count = 0

    def look(self, value: object) -> Seen:
        """*value* and all below it."""
        self._tokens: list[Hashable] = []
        self._undo: list[Callable[[], None]] = []
        self._kind = Kind.ATTRIBUTE
        self._met: dict[int, int] = {}
        self._visit(value, 0)
        text = _text(value)
        return Seen(tuple(self._tokens), text, self._kind, self._undo)

    def _visit(self, value: object, depth: int) -> None:
        self._count += 1
        if self._count > MOST_VALUES or depth > DEEPEST:
            return
        if isinstance(value, _ATOMS):
            self._tokens.append((type(value).__name__, repr(value)))
            return
        if id(value) in self._met or id(value) in self._registered:
            self._tokens.append(self._met.get(id(value), "registered"))
            return
        self._met[id(value)] = len(self._met)
        self._tokens.append(type(value).__name__)
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._array(value)
        elif isinstance(value, _GENERATORS):
            self._generator(value)
        elif isinstance(value, (dict, list, tuple, set, frozenset, deque)):
            self._container(value, depth)
        elif _is_object(value):
            self._attributes(value, depth)

    def _array(self, value: torch.Tensor | np.ndarray) -> None:
        if isinstance(value, np.ndarray):
            kept = value.copy()
            self._tokens.append((value.dtype.str, value.shape, _digest(value.tobytes())))
            self._undo.append(partial(np.copyto, value, kept))
            return
        self._tokens.append((str(value.dtype), tuple(value.shape), tensor_digest(value)))
        if not value.is_meta and value.layout is torch.strided:
            self._undo.append(partial(_put_back, value.detach(), value.detach().clone()))

    def _generator(self, value: object) -> None:
        self._kind = Kind.RANDOM
        if isinstance(value, random.Random):
            state = value.getstate()
            self._tokens.append(hash(state))
            self._undo.append(partial(value.setstate, state))
        elif isinstance(value, torch.Generator):
            seeds = value.get_state()
            self._tokens.append(tensor_digest(seeds))
            self._undo.append(partial(_set_state, value, seeds))
        elif isinstance(value, np.random.Generator):
            found = value.bit_generator.state
            self._tokens.append(repr(found))
            self._undo.append(partial(setattr, value.bit_generator, "state", found))
        elif isinstance(value, np.random.RandomState):
            legacy = value.get_state(legacy=False)
            state = legacy["state"]
            self._tokens.append((state["pos"], _digest(np.asarray(state["key"]).tobytes())))
            self._tokens.append((legacy["has_gauss"], legacy["gauss"]))
            self._undo.append(partial(value.set_state, legacy))

    def _container(self, value: object, depth: int) -> None:
        if isinstance(value, dict):
            self._undo.append(partial(_refill_dict, value, dict(value)))
            for key, child in list(value.items()):
                if self._count > MOST_VALUES:
                    break
                self._tokens.append(repr(key) if isinstance(key, _ATOMS) else type(key).__name__)
                self._visit(child, depth + 1)
            return
        if isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self._undo.append(partial(_refill_set, value, set(value)))
            self._tokens.append(frozenset(v for v in value if isinstance(v, _ATOMS)))
            self._tokens.append(len(value))
            return
        assert isinstance(value, (list, tuple, deque))
        self._tokens.append(len(value))
        if isinstance(value, list):
            self._undo.append(partial(_refill_list, value, list(value)))
        elif isinstance(value, deque):
            self._undo.append(partial(_refill_deque, value, list(value)))
        for child in list(value):
            if self._count > MOST_VALUES:
                break
            self._visit(child, depth + 1)

    def _attributes(self, value: object, depth: int) -> None:
        space: dict[object, object] = vars(value)  # type: ignore[assignment]  # its keys are names
        self._undo.append(partial(_refill_dict, space, dict(space)))
        skipped = _OF_MODULES if isinstance(value, nn.Module) else ()
        for key, child in list(space.items()):
            if key not in skipped:
                self._tokens.append(key)
                self._visit(child, depth + 1)


def _is_object(value: object) -> bool:
    """Whether *value* is an object whose attributes are data."""
    if isinstance(value, (type, FunctionType, MethodType)) or type(value).__module__ in _OPAQUE:
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


_OPAQUE = frozenset({"builtins", "logging", "threading", "weakref", "_weakref"})
"""Modules whose objects are not looked into."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """A digest of the elements of *tensor*."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return "no data"
    with torch.no_grad():
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).cpu()
        return _digest(flat.view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _put_back(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    if not torch.equal(tensor, kept):
        tensor.copy_(kept)


def _refill_dict(found: dict[object, object], kept: dict[object, object]) -> None:
    if not _is_same(list(found.items()), list(kept.items())):
        found.clear()
        found.update(kept)


def _refill_list(found: list[object], kept: list[object]) -> None:
    found[:] = kept


def _refill_set(found: set[object], kept: set[object]) -> None:
    found.clear()
    found.update(kept)


def _refill_deque(found: deque[object], kept: list[object]) -> None:
    found.clear()
    found.extend(kept)


def _is_same(one: list[tuple[object, object]], two: list[tuple[object, object]]) -> bool:
    return len(one) == len(two) and all(
        a is c and b is d for (a, b), (c, d) in zip(one, two, strict=True)
    )


def _text(value: object) -> str:
    if isinstance(value, _ATOMS):
        return f"{value!r:.40}"
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__}{list(value.shape)}"
    if isinstance(value, (dict, list, tuple, set, deque)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
