"""Bodies as compiled code.

A body is cut at its random calls (:mod:`piper.runtime.pieces`): those draw from explicit
generators, as in code that is not compiled, bit for bit. What lies between is compiled when it is
first called with inputs of a layout (see :mod:`piper.runtime.warm_up`). Compiled code returns what
the plan was verified for: the strides, and no more shared memory, than the operators have when they
are called one by one.
"""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias

import torch

from piper.errors import CompileError
from piper.ir import body as ir
from piper.ir.pieces import Piece, cut_at_random_calls
from piper.ops.base import RandomKey
from piper.runtime.code import ChunkCode, chunk_function
from piper.runtime.inductor import compile_body

Layout: TypeAlias = tuple[tuple[int, ...], ...]
"""The strides of each input."""


class Compilation(StrEnum):
    """Whether chunks are compiled, and what happens to one that cannot be: an error, or it runs as
    it is.
    """

    OFF = "off"
    ON = "on"
    FALLBACK = "fallback"


def compiled_function(
    body: ir.Body,
    bindings: Mapping[str, int],
    device: torch.device,
    name: str,
    *,
    fallback: bool = False,
) -> ChunkCode:
    """Like :func:`~piper.runtime.code.chunk_function`, compiled when first called. Cached: one body
    is compiled once in a process, and *name*, for errors, is that of the chunk that came first.

    The function raises :class:`~piper.errors.CompileError` where a piece cannot be compiled; with
    *fallback* that piece runs uncompiled, with a warning.
    """
    code = _of_body(body, tuple(sorted(bindings.items())), device, fallback=fallback)
    code.name = code.name or name
    return code


_COMPILING = threading.Lock()
"""Compilers have state of their own: one thread at a time."""


@lru_cache(maxsize=4096)
def _of_body(
    body: ir.Body, bindings: tuple[tuple[str, int], ...], device: torch.device, *, fallback: bool
) -> "_CompiledBody":
    return _CompiledBody(body, dict(bindings), device, fallback=fallback)


class _CompiledBody:
    """A body's pieces, in order. A :data:`~piper.runtime.code.ChunkCode`."""

    def __init__(
        self,
        body: ir.Body,
        bindings: Mapping[str, int],
        device: torch.device,
        *,
        fallback: bool,
    ) -> None:
        self.name = ""
        self._body = body
        self._pieces = [
            (piece, _CompiledPiece(piece, bindings, device, fallback=fallback))
            for piece in cut_at_random_calls(body)
        ]
        self._last = self._last_uses()

    def __call__(
        self, inputs: list[torch.Tensor], key: RandomKey | None
    ) -> tuple[torch.Tensor, ...]:
        values = dict(enumerate(inputs))
        inputs.clear()
        for number, (piece, run) in enumerate(self._pieces):
            arguments = [values[ref] for ref in piece.inputs]
            for ref in self._last[number]:
                del values[ref]
            values.update(zip(piece.outputs, run(arguments, key, self.name), strict=True))
        return tuple(values[ref] for ref in self._body.outputs)

    def _last_uses(self) -> list[list[int]]:
        """Per piece, what nothing after it reads."""
        kept, last = set(self._body.outputs), list[list[int]]()
        for piece, _ in reversed(self._pieces):
            last.append([ref for ref in piece.inputs if ref not in kept])
            kept.update(piece.inputs)
        return last[::-1]


_Code: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


class _CompiledPiece:
    """A piece; its code by layout of the inputs."""

    def __init__(
        self, piece: Piece, bindings: Mapping[str, int], device: torch.device, *, fallback: bool
    ) -> None:
        self._piece, self._bindings, self._device = piece, bindings, device
        self._fallback = fallback
        self._eager = chunk_function(piece.body, bindings, device)
        self._compiles = piece.computes and not piece.random
        self._by_layout: dict[Layout, _Code] = {}

    def __call__(
        self, inputs: list[torch.Tensor], key: RandomKey | None, name: str
    ) -> Sequence[torch.Tensor]:
        if not self._compiles:
            return self._eager(inputs, key)
        layout = tuple(t.stride() for t in inputs)
        code = self._by_layout.get(layout)
        if code is None:
            with _COMPILING:
                code = self._by_layout.get(layout)
                if code is None:
                    code = self._by_layout[layout] = self._compile(inputs, name)
        return code(inputs)

    def _compile(self, inputs: Sequence[torch.Tensor], name: str) -> _Code:
        try:
            code = compile_body(self._piece.body, self._bindings, self._device, inputs)
            return _as_verified(code, inputs, self._eager(list(inputs), None))
        except CompileError as error:
            message = f"chunk {name!r} cannot be compiled: {error}"
            if not self._fallback:
                raise CompileError(
                    f'{message}; compile="fallback" runs such chunks uncompiled'
                ) from error
            warnings.warn(f"{message}; it runs uncompiled", stacklevel=2)
            return lambda values: list(self._eager(list(values), None))


def _as_verified(
    code: _Code, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> _Code:
    """*code*, its results given the strides of those *expected*, and memory of their own where
    those have it.

    Both are properties of the code, so trying it once on *inputs* tells.
    """
    found = code(inputs)
    for mine, theirs in zip(found, expected, strict=True):
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise CompileError(
                f"expected a result {theirs.dtype} {tuple(theirs.shape)}, the compiler's is {mine.dtype} {tuple(mine.shape)}"
            )
    apart = _sharing(found, inputs) - _sharing(expected, inputs)
    strides = {
        i: theirs.stride()
        for i, (mine, theirs) in enumerate(zip(found, expected, strict=True))
        if mine.stride() != theirs.stride() and _is_dense(theirs)
    }
    copies = {*strides, *(i for i, _ in apart)}
    if not copies:
        return code

    def corrected(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = code(values)
        for i in copies:
            result = results[i]
            empty = torch.empty_strided(
                result.shape,
                strides.get(i, result.stride()),
                dtype=result.dtype,
                device=result.device,
            )
            results[i] = empty.copy_(result)
        return results

    return corrected


def _sharing(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> set[tuple[int, int]]:
    """Pairs (i, j): result i is in the memory of an earlier result j, or of input −1 − j."""
    memory = [t.untyped_storage().data_ptr() for t in results]
    given = [t.untyped_storage().data_ptr() for t in inputs]
    pairs = {(i, j) for i, p in enumerate(memory) for j in range(i) if p and p == memory[j]}
    return pairs | {
        (i, -1 - j) for i, p in enumerate(memory) for j, q in enumerate(given) if p and p == q
    }


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor of these strides can be written: no element twice in memory."""
    return all(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
