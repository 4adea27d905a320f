"""Random numbers that do not depend on the strategy.

Each random operator call draws from its own stream, named by (seed, step, global microbatch,
ordinal of the call among the random calls of the captured graph). So chunk boundaries, schedules,
recomputation, threads and processes do not change one bit, and eager PyTorch under
:class:`DrawFrom` draws the same numbers.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from struct import pack
from types import TracebackType
from typing import Self, TypeAlias

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from piper.errors import CaptureError
from piper.ops.base import RandomKey

Draw: TypeAlias = Callable[..., object]
"""A random operator as a function ``(generator, *args, **kwargs)``."""

_MASK = (1 << 64) - 1


def stream_seed(seed: int, step: int, microbatch: int, ordinal: int) -> int:
    """64 well mixed bits that name one random stream.

    (A CPU generator is seeded with the low 32 of them: torch's Mersenne twister takes no more.)
    """
    words = pack("<4Q", seed & _MASK, step & _MASK, microbatch & _MASK, ordinal & _MASK)
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


class _Generators(threading.local):
    """One generator per thread and device: reseeding costs 1 µs, and a stream is drawn from in one
    call.
    """

    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.Generator] = {}


_GENERATORS = _Generators()


def _generator(device: torch.device, seed: int) -> torch.Generator:
    generator = _GENERATORS.by_device.get(device)
    if generator is None:
        generator = _GENERATORS.by_device[device] = torch.Generator(device)
    return generator.manual_seed(seed)


def generator_for(key: RandomKey, slot: int, device: torch.device) -> torch.Generator:
    """The generator of the body's random slot number *slot*, at the start of its stream.

    It serves one operator call: the next call of this function on the same thread may reseed it.
    """
    seed = stream_seed(key.seed, key.step, key.microbatch, key.ordinals[slot])
    return _generator(device, seed)


def is_random(overload: OpOverload) -> bool:
    """Whether the operator is tagged as drawing random numbers; capture counts ordinals by this
    tag.
    """
    return torch.Tag.nondeterministic_seeded in overload.tags


@cache
def draw(overload: OpOverload) -> Draw:
    """*overload* as a function of an explicit generator.

    Raises :class:`CaptureError` for an operator that can only draw from the global generator.
    """
    if _takes_generator(overload):
        return _with_generator(overload)
    if (special := _SPECIAL.get(overload)) is not None:
        return special
    if (sibling := _sibling(overload)) is not None:
        return _with_generator(sibling)
    if _position(overload, "dropout_p") is not None:
        return _without_dropout(overload)
    raise CaptureError(
        f"operator {overload} draws from the global random state and takes no generator, so its numbers would "
        f"depend on the strategy; use a torch.nn.functional or torch operator that takes a generator"
    )


def _takes_generator(overload: OpOverload) -> bool:
    return any(argument.name == "generator" for argument in overload._schema.arguments)  # noqa: SLF001


def _with_generator(overload: OpOverload) -> Draw:
    def call(generator: torch.Generator, /, *args: object, **kwargs: object) -> object:
        return overload(*args, **{**kwargs, "generator": generator})

    positional = _position(overload, "generator")
    if positional is None:
        return call

    def call_positional(generator: torch.Generator, /, *args: object, **kwargs: object) -> object:
        # A traced graph may pass `None` by position.
        head, tail = args[:positional], args[positional + 1 :]
        if tail:
            return overload(*head, generator, *tail, **kwargs)
        return overload(*head, **{**kwargs, "generator": generator})

    return call_positional


def _position(overload: OpOverload, name: str) -> int | None:
    """Index of the positional argument *name*, if there is one."""
    for index, argument in enumerate(overload._schema.arguments):  # noqa: SLF001
        if argument.name == name and not argument.kwarg_only:
            return index
    return None


def _sibling(overload: OpOverload) -> OpOverload | None:
    """The overload of the same operator with the same arguments and a generator."""
    wanted = _argument_types(overload)
    packet = overload.overloadpacket
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        if _takes_generator(candidate) and _argument_types(candidate) == wanted:
            return candidate
    return None


def _argument_types(overload: OpOverload) -> tuple[tuple[str, str], ...]:
    return tuple(
        (argument.name, str(argument.type))
        for argument in overload._schema.arguments  # noqa: SLF001
        if argument.name != "generator"
    )


def _without_dropout(overload: OpOverload) -> Draw:
    """Fused attention: random only with dropout inside, which cannot be seeded."""
    position = _position(overload, "dropout_p")

    def call(generator: torch.Generator, /, *args: object, **kwargs: object) -> object:
        del generator
        probability = kwargs.get("dropout_p", 0.0)
        if position is not None and position < len(args):
            probability = args[position]
        if probability != 0.0:
            raise CaptureError(
                f"operator {overload} with dropout_p={probability} draws from the global random state; set "
                f"dropout_p=0, or use the math attention (torch.nn.attention.sdpa_kernel(SDPBackend.MATH))"
            )
        return overload(*args, **kwargs)

    return call


def _native_dropout(
    generator: torch.Generator, /, value: torch.Tensor, p: float, train: bool | None = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.native_dropout`` with the mask drawn from *generator*: ``(value * mask / (1 - p),
    mask)``.
    """
    if train is False or p == 0:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool)
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return value * mask * (1 / (1 - p)), mask


_SPECIAL: Mapping[OpOverload, Draw] = {torch.ops.aten.native_dropout.default: _native_dropout}


class DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Make eager PyTorch draw what a captured step draws for one global microbatch.

    Ordinals count the random operator calls inside one ``with`` block, in call order. In-place
    operators are included. Use it around the forward of one microbatch, and around its backward:
    the ordinal of the next call is the seed of torch's default generator, so that a checkpoint,
    which puts that generator's state back to repeat a forward, repeats its numbers too. Afterwards
    the default generator is as it was. One thread at a time is inside.
    """

    _alone = threading.RLock()  # there is one default generator

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._seed, self._step, self._microbatch = seed, step, microbatch
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        self._alone.acquire()
        self._before.append(torch.default_generator.get_state())
        torch.default_generator.manual_seed(0)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's own
        torch.default_generator.set_state(self._before.pop())
        self._alone.release()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run *func*; a random one with the next stream's generator."""
        del types
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        ordinal = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(ordinal + 1)
        seed = stream_seed(self._seed, self._step, self._microbatch, ordinal)
        return draw(func)(_generator(_device_of(args, kwargs), seed), *args, **kwargs)


def _device_of(args: Sequence[object], kwargs: Mapping[str, object]) -> torch.device:
    """Where an operator call computes: its tensors' device, else the one that it names, else the
    CPU.
    """
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.device
    named = kwargs.get("device")
    return torch.device("cpu") if named is None else torch.device(str(named))
