"""Regions: named, numbered parts of a model that directives refer to.

Free of torch. An annotation does nothing in eager execution. While a model is captured, the active
:class:`RegionTrace` follows the annotations that are entered and hands the current region path to
whoever records the operations.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from piper.boundary import public
from piper.errors import AnnotationError

RegionPath: TypeAlias = tuple[tuple[str, int], ...]
"""Tags from the outermost region to the innermost, for instance ``(("PP", 1), ("EP", 3))``."""

RESERVED_NAMES = frozenset({"PASS", "COMM", "MB"})
"""Tags that piper sets itself: pass, kind of communication, microbatch."""

Marker: TypeAlias = Callable[[RegionPath], AbstractContextManager[None]]
"""Marks every operation recorded inside the context with the region path."""


class RegionTrace:
    """The regions entered during one execution of the model.

    :meth:`begin` starts an execution: it forgets the counters, so that each execution numbers its
    regions from 0. :meth:`begin_backward` says that the forward is over: annotations entered later
    belong to a forward that a checkpoint repeats.
    """

    def __init__(self, marker: Marker) -> None:
        self._marker = marker
        self.begin()

    def begin(self) -> None:
        """Start an execution of the model's forward."""
        self._counts: dict[str, int] = {}
        self._explicit: set[str] = set()
        self._path: RegionPath = ()
        self._backward = False

    def begin_backward(self) -> None:
        """The forward has ended."""
        self._backward = True

    @contextmanager
    def enter(self, name: str, index: int | None) -> Iterator[None]:
        """Enter region *name*; without *index*, the next number of that name."""
        if self._backward and index is None:
            # A checkpoint repeats its forward during the backward. Which of the counted regions it
            # repeats is unknown here, so the operations keep the region of the gradient that needs
            # them.
            yield
            return
        if any(tag == name for tag, _ in self._path):
            raise AnnotationError(
                f"region {name!r} is entered inside region {dict(self._path)}: a region cannot "
                f"contain another of the same name; give the inner one another name"
            )
        outer = self._path
        self._path = (*outer, (name, self._number(name, index)))
        try:
            with self._marker(self._path):
                yield
        finally:
            self._path = outer

    def _number(self, name: str, index: int | None) -> int:
        if index is not None:
            self._explicit.add(name)
        if name in self._explicit and (index is None or name in self._counts):
            raise AnnotationError(
                f"region {name!r} is annotated both with an index and without one: give every "
                f"{name!r} an index, or none"
            )
        if index is not None:
            return index
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        return number


_ACTIVE: ContextVar[RegionTrace | None] = ContextVar("piper_region_trace", default=None)


@contextmanager
def recording(trace: RegionTrace) -> Iterator[None]:
    """Make *trace* follow the annotations entered inside the context."""
    token = _ACTIVE.set(trace)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


@contextmanager
def annotate(name: str, index: int | None = None) -> Iterator[None]:
    """Mark the operations inside the context as region *name*, number *index*.

    Without *index*, regions of one name are numbered from 0 in the order in which one forward
    enters them. Regions of different names nest. Outside a capture nothing happens.

    Raises :class:`piper.errors.AnnotationError` for a reserved or empty name, a bad index, a name
    nested in itself, and a name used both with and without an index.
    """
    check_tag(name, index)
    trace = _ACTIVE.get()
    if trace is None:
        yield
        return
    with trace.enter(name, index):
        yield


def check_tag(name: str, index: int | None) -> None:
    """Raise :class:`AnnotationError` unless *name* and *index* can tag a region."""
    if not isinstance(name, str) or not name:
        raise AnnotationError(f"a region's name must be a non-empty string, found {name!r}")
    if name in RESERVED_NAMES:
        raise AnnotationError(
            f"region name {name!r} is reserved (reserved: {', '.join(sorted(RESERVED_NAMES))}); "
            f"choose another"
        )
    if index is None:
        return
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise AnnotationError(
            f"the index of region {name!r} must be an integer of at least 0, found {index!r}"
        )


class Module(Protocol):
    """What :func:`annotate_module` needs of a ``torch.nn.Module``."""

    forward: Callable[..., object]


@dataclass(slots=True)
class AnnotatedForward:
    """Replaces a module's ``forward`` on the instance: enters the regions, then calls the original.

    Plain data (the module, its tags, a ``forward`` that the instance already had), so that the
    model can still be pickled and deep-copied.
    """

    module: Module
    tags: RegionPath
    inner: Callable[..., object] | None

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._call(self.tags, args, kwargs)

    def _call(
        self, tags: RegionPath, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if not tags:
            return self.original(*args, **kwargs)
        (name, index), *rest = tags
        with annotate(name, index):
            return self._call(tuple(rest), args, kwargs)

    @property
    def original(self) -> Callable[..., object]:
        """The ``forward`` that the module has without the annotation."""
        if self.inner is not None:
            return self.inner
        bound: Callable[..., object] = type(self.module).forward.__get__(self.module)
        return bound

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


@public
def annotate_module(module: Module, name: str, index: int) -> None:
    """Make *module* (a ``torch.nn.Module``) region *name*, number *index*, without editing its
    code.

    Every call of the module enters the region. Doing it again with the same tag changes nothing; a
    module can carry tags of several names, the first one outermost. The annotated model keeps its
    ``state_dict`` and can be pickled and deep-copied.

    Raises :class:`piper.errors.AnnotationError` for a bad tag and for a module that already is
    region *name* with another index.
    """
    check_tag(name, index)
    if index is None:
        raise AnnotationError(
            f"annotate_module needs an index for region {name!r}, for instance the layer's number"
        )
    if not callable(getattr(type(module), "forward", None)):
        raise AnnotationError(
            f"annotate_module marks a torch.nn.Module, found {type(module).__name__}: {module!r:.80}"
        )
    present = vars(module).get("forward")
    if not isinstance(present, AnnotatedForward) or present.module is not module:
        module.forward = AnnotatedForward(module, ((name, index),), present)
        return
    known = dict(present.tags)
    if name not in known:
        present.tags = (*present.tags, (name, index))
    elif known[name] != index:
        raise AnnotationError(
            f"module {type(module).__name__} already is region {name!r} with index {known[name]}; "
            f"it cannot also be index {index}"
        )
