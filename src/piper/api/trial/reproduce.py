"""Does the model compute the same twice? What it does not, and what makes it so.

A second run begins where the first one left the Python state (attributes, generators), with equal
tensors, data and seeds of torch. So whatever tracing would freeze, and the result depends on, shows
as a difference.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

from piper.api.compare import compare
from piper.api.trial.eager import EagerRun
from piper.api.trial.lines import line_of_change
from piper.api.trial.state import Kind, State, Watch, tensor_digest
from piper.errors import CaptureError

ROUNDINGS = 64
"""Differences of two runs of up to as many units in the last place are rounding (kernels with
threads may add up in another order).
"""


@dataclass(frozen=True, slots=True)
class Reproduced:
    """A run that was repeated with the same result. ``changing`` are the places whose values change
    in every run, with how: nothing depended on them. ``drawn`` likewise are generators.
    """

    run: EagerRun
    changing: tuple[str, ...]
    drawn: tuple[str, ...]


class Reproduction:
    """Runs the same microbatch again and again: *run* does so once, from the state in which the
    model is.
    """

    def __init__(self, run: Callable[[], EagerRun], watch: Watch) -> None:
        self._run, self._watch = run, watch

    def prove(self, first: EagerRun, before: State) -> Reproduced:
        """Repeat *first*, which began with the state *before* and has just ended.

        Raises :class:`CaptureError` naming the generator, the attribute or the module that makes
        the second result another one, with the line.
        """
        between = self._watch.look()
        second = self._run()
        after = self._watch.look()
        changed = before.changed(between)
        if (what := difference(first, second)) is not None:
            self._blame(first, before, between, changed, what)
        drawn = [n for n in changed if _is_random(n, between)]
        for name in drawn:
            self._probe(first, before, name)
        again = set(between.changed(after)).difference(drawn)
        changing = [
            f"{n} ({before.seen[n].text if n in before.seen else 'absent'} → {_text(between, n)} → {_text(after, n)})"
            for n in changed
            if n in again
        ]
        return Reproduced(first, tuple(changing), tuple(drawn))

    def _blame(
        self, first: EagerRun, before: State, between: State, changed: Sequence[str], what: str
    ) -> None:
        before.restore()
        repeated = self._run()
        if (still := difference(first, repeated)) is not None:
            before.restore()
            raise CaptureError(
                f"the model is not reproducible: two runs in plain PyTorch from the same state, with the same data and seeds, differ in {still}. "
                "Something that is no state of the model decides (time, os.urandom, secrets, a global variable, an iterator, a kernel that is not "
                "deterministic); the captured graph would keep what it was at capture. Make it an input, or draw with torch"
            )
        guilty = [name for name in changed if self._matters(first, before, between, [name])]
        for name in guilty or changed:
            self._raise(before, between, name, what)
        raise CaptureError(
            f"two runs of the model in plain PyTorch on the same microbatch, with the same seeds, differ in {what}, though nothing that piper "
            "watches changed; the captured graph would keep what was at capture"
        )

    def _matters(
        self, first: EagerRun, before: State, between: State, names: Sequence[str]
    ) -> bool:
        before.restore()
        between.restore_only(names)
        return difference(first, self._run()) is not None

    def require_unwritten(self, first: EagerRun, before: State, model: nn.Module) -> None:
        """Raise :class:`CaptureError` naming a parameter that the forward wrote, with the line."""
        for name, parameter in model.named_parameters():
            found = first.parameters[name]
            if torch.equal(found, parameter.detach().to(found.dtype)):
                continue
            before.restore()
            where = line_of_tensor(self._run, model, name)
            raise CaptureError(
                f"{where}the forward writes parameter {name!r}; only the optimizer may. Make it a buffer, or compute the changed weight without "
                "writing it back"
            )

    def _raise(self, before: State, between: State, name: str, what: str) -> None:
        before.restore()
        where = line_of_change(self._run, lambda: self._watch.token(name))
        before.restore()
        at = f"{where}: " if where else ""
        if _is_random(name, between):
            raise CaptureError(
                f"{at}the forward draws random numbers from {name}, and the result depends on them ({what} differ): tracing draws once, and the captured graph keeps "
                "what was drawn. Draw with torch (torch.rand, F.dropout: its numbers are new in every step, and the same under every strategy) and "
                "choose with tensors (torch.where), or make it an input of the batch"
            )
        raise CaptureError(
            f"{at}the forward changes {name} ({before.seen[name].text if name in before.seen else 'absent'} → {_text(between, name)}), and "
            f"the next call depends on it ({what} differ): the captured graph keeps what it was at capture. Register a tensor as a buffer (register_buffer, "
            "and write it with copy_), and make a number an input of the batch or a buffer"
        )

    def _probe(self, first: EagerRun, before: State, name: str) -> None:
        """See whether the result depends on what a generator draws: with numbers close to 0, close
        to 1, and others.
        """
        for state in _extremes(self._watch.value(name), partial(self._watch.put, name)):
            before.restore()
            state()
            if (what := difference(first, self._run())) is not None:
                self._raise(before, before, name, what)


def line_of_tensor(run: Callable[[], object], model: nn.Module, name: str) -> str:
    """At which line of *run* parameter or buffer *name* of *model* changes, with a colon; empty if no
    line shows it.
    """
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)

    def token() -> object:
        tensor = module._parameters.get(own, module._buffers.get(own))  # noqa: SLF001
        return None if tensor is None else tensor_digest(tensor)

    found = line_of_change(run, token)
    return f"{found}: " if found else ""


def difference(one: EagerRun, two: EagerRun) -> str | None:
    """What of *two* differs from *one* by more than rounding, in words."""
    outputs = _tensors(one.outputs), _tensors(two.outputs)
    if _differ(*outputs) is not None:
        return "the outputs"
    if _differ({"": torch.tensor(one.loss)}, {"": torch.tensor(two.loss)}) is not None:
        return "the loss"
    for what, a, b in (
        ("the gradient of {}", one.gradients, two.gradients),
        ("buffer {}", one.buffers, two.buffers),
    ):
        if (name := _differ(a, b)) is not None:
            return what.format(repr(name))
    return None


def _tensors(tree: object) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _differ(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the tensor that differs the most, if any does."""
    errors = compare(_finite(two), _finite(one))
    name = max(errors.by_name, key=lambda n: errors.by_name[n], default=None)
    if name is None or errors.worst <= _allowed(one.values()):
        return None
    return name


def _finite(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """*tensors* with numbers for what is none: where both have the same, nothing differs."""
    return {
        n: t.nan_to_num(nan=0.5, posinf=2.0, neginf=-2.0) if t.is_floating_point() else t
        for n, t in tensors.items()
    }


def _allowed(tensors: Iterable[torch.Tensor]) -> float:
    types = {t.dtype for t in tensors if t.is_floating_point()}
    return ROUNDINGS * max((torch.finfo(t).eps for t in types), default=0.0)


def _is_random(name: str, state: State) -> bool:
    return name in state.seen and state.seen[name].kind is Kind.RANDOM


def _text(state: State, name: str) -> str:
    return state.seen[name].text if name in state.seen else "absent"


def _extremes(
    generator: object, replace: Callable[[object], None]
) -> Iterator[Callable[[], object]]:
    """States of a generator under which it draws something else: the smallest numbers and the
    largest (of a Mersenne twister, whose output shows its state), and some others.
    """
    if isinstance(generator, random.Random):
        version, _, gauss = random.Random(0).getstate()  # noqa: S311 (only its form)
        for word in (0, _UNTEMPERED):
            words = (*_ordinary(), *[word] * _EXTREME)
            yield partial(generator.setstate, (version, (*words, _TWISTER - _EXTREME), gauss))
        for seed in range(2):
            yield partial(generator.seed, seed)
    elif isinstance(generator, np.random.RandomState):
        for bits in _twisters():
            state = bits.state
            yield partial(generator.set_state, {**state, "has_gauss": 0, "gauss": 0.0})
        for seed in range(2):
            yield partial(generator.seed, seed)
    elif isinstance(generator, np.random.Generator):
        for bits in _twisters():
            yield partial(replace, np.random.Generator(bits))
        for seed in range(4):
            fresh = type(generator.bit_generator)(seed).state
            yield partial(setattr, generator.bit_generator, "state", fresh)
    elif isinstance(generator, torch.Generator):
        for seed in range(4):
            yield partial(generator.manual_seed, seed)


_TWISTER = 624
"""Words of a Mersenne twister's state."""

_EXTREME = 64
"""Of these, so many are made extreme: two are one number of ``random.random``. Behind them the twister
goes on as usual, so that a loop that waits for another number ends.
"""

_UNTEMPERED = 0x12DD9BB3
"""The word of the state that is shown as all ones."""


def _twisters() -> Iterator[np.random.MT19937]:
    """Numpy's twister in extreme states."""
    for word in (0, _UNTEMPERED):
        bits = np.random.MT19937()
        key = np.array([*_ordinary(), *[word] * _EXTREME], dtype=np.uint32)
        bits.state = {
            "bit_generator": "MT19937",
            "state": {"key": key, "pos": _TWISTER - _EXTREME},
        }
        yield bits


def _ordinary() -> tuple[int, ...]:
    words: tuple[int, ...] = random.Random(1).getstate()[1]  # noqa: S311
    return words[: _TWISTER - _EXTREME]
