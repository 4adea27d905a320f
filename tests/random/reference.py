"""What every strategy must equal, in plain PyTorch: one process that runs the microbatches of the
global batch one after the other. Nothing of piper is imported, and none of its code is used.
"""

import copy
import fnmatch
import hashlib
import math
import struct
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

HUGE = 1e6
"""A reference whose values exceed this has diverged: rounding errors then say nothing."""


class Diverged(Exception):  # noqa: N818 (no error: there is nothing left to compare)
    """The plain training itself has left the range in which numbers can be compared."""


class DrawnNumbers(TorchDispatchMode):
    """Random operators draw from streams that are named by (seed, step, microbatch, how many calls
    came before): 64 bits of BLAKE2b over the four as little-endian 64-bit words.
    """

    def __init__(self, seed, step, microbatch):
        super().__init__()
        self.words, self.calls = (seed, step, microbatch), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        words = struct.pack("<4Q", *(w % 2**64 for w in (*self.words, self.calls)))
        self.calls += 1
        stream = torch.Generator()
        stream.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little"))
        if func is torch.ops.aten.native_dropout.default:
            value, p = args[:2]
            mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p, generator=stream)
            return value * mask * (1 / (1 - p)), mask
        if func is torch.ops.aten.rand_like.default:
            return torch.empty_like(args[0]).uniform_(generator=stream)
        if func is torch.ops.aten.randn_like.default:
            return torch.empty_like(args[0]).normal_(generator=stream)
        assert func in (
            torch.ops.aten.bernoulli.default,
            torch.ops.aten.bernoulli_.float,
            torch.ops.aten.bernoulli.p,
        ), func
        return func(*args, **kwargs, generator=stream)


def grouped_mm(rows, weights, counts):
    """Row i times the matrix of its group; rows are sorted by group."""
    group = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.einsum("nk,nkm->nm", rows, weights[group])


def rows_of(tree, start, stop):
    """Rows of every tensor of *tree*."""
    if isinstance(tree, torch.Tensor):
        return tree[start:stop]
    if isinstance(tree, dict):
        return {key: rows_of(child, start, stop) for key, child in tree.items()}
    if isinstance(tree, tuple):
        return tuple(rows_of(child, start, stop) for child in tree)
    return tree


def count_rows(tree):
    """Rows of the first tensor."""
    if isinstance(tree, torch.Tensor):
        return len(tree)
    children = tree.values() if isinstance(tree, dict) else tree
    return next(n for n in map(count_rows, children) if n) if isinstance(tree, dict | tuple) else 0


def cast(tree, dtype):
    """Floating-point tensors of *tree* in *dtype*."""
    if dtype is None:
        return tree
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: cast(child, dtype) for key, child in tree.items()}
    return tuple(cast(child, dtype) for child in tree) if isinstance(tree, tuple) else tree


def call(model, inputs):
    """The model on one tensor, several, or named ones."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@dataclass
class Types:
    """A policy of element types: parameters are kept in *master*, used in *compute*; what each
    microbatch adds to a gradient is summed in *reduce*. ``scale``: of the loss, by which gradients
    are divided before they are used; ``backoff`` and ``growth`` change it.
    """

    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype
    output: torch.dtype
    scale: float | None = None
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


@dataclass
class Options:
    """How to train: *optimizer* over parameters or groups; ``groups``: ``{"names": patterns,
    **options}``; ``lr``: factor on the learning rates by step; clipping by norm.
    """

    optimizer: object
    seed: int = 0
    groups: list | None = None
    lr: object = None
    max_norm: float | None = None
    norm_type: float = 2.0
    types: Types | None = None


@dataclass
class Found:
    """What a step computed."""

    loss: float
    norm: float | None = None
    skipped: bool = False
    scale: float | None = None


@dataclass
class Plain:
    """Plain training of a copy of *model*."""

    model: nn.Module
    loss_fn: object
    options: Options
    steps: int = 0
    kept: int = 0
    good: int = 0
    grads: dict = field(default_factory=dict)

    def __post_init__(self):
        self.model = copy.deepcopy(self.model)
        self.model.grouped = grouped_mm
        types = self.options.types
        self.scale = None if types is None else types.scale
        if types is not None:
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    wide = parameter.data.to(types.master)
                    if not parameter.requires_grad:  # kept in the compute type alone
                        wide = wide.to(types.compute)
                    parameter.data = wide
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        argument = list(named.values())
        if self.options.groups is not None:
            argument, taken = [], set()
            every = list(self.model.named_parameters(remove_duplicate=False))
            for group in self.options.groups:
                own = {k: v for k, v in group.items() if k != "names"}
                ids = {
                    id(p)
                    for n, p in every
                    if any(fnmatch.fnmatchcase(n, pattern) for pattern in group["names"])
                }
                mine = [p for p in named.values() if id(p) in ids]
                taken |= {id(p) for p in mine}
                argument.append({"params": mine, **own})
            if rest := [p for p in named.values() if id(p) not in taken]:
                argument.append({"params": rest})
        self.optimizer = self.options.optimizer(argument)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    # --- one step ------------------------------------------------------------------------------

    def step(self, inputs, targets, replicas, microbatches, buffers="first", update=True):
        """Train on a global batch whose parts are those of *replicas* replicas of *microbatches*
        each; *buffers* says what becomes of what each replica writes.
        """
        loss, grads = self._gradients(inputs, targets, replicas, microbatches, buffers)
        for name, gradient in grads.items():
            self.grads[name] = self.grads[name] + gradient if name in self.grads else gradient
        if not update:
            self.kept += 1
            return Found(loss, scale=self.scale)
        scale, skipped, norm = self.scale, False, None
        parameters = dict(self.model.named_parameters())
        for name, parameter in parameters.items():
            parameter.grad = self.grads.get(name)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype) / (scale or 1.0)
        if self.options.max_norm is not None or scale is not None:
            most = math.inf if self.options.max_norm is None else self.options.max_norm
            norm = float(
                nn.utils.clip_grad_norm_(
                    [p for p in parameters.values() if p.grad is not None],
                    most,
                    self.options.norm_type,
                )
            )
            skipped = scale is not None and not math.isfinite(norm)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            factor = 1.0 if self.options.lr is None else self.options.lr(self.steps)
            group["lr"] = rate * factor
        if not skipped:
            self.optimizer.step()
        self._rescale(skipped)
        self.grads, self.kept, self.steps = {}, 0, self.steps + 1
        self._require_finite(loss, skipped)
        return Found(loss, norm, skipped, scale)

    def evaluate(self, inputs, targets, size):
        """The loss in evaluation mode of microbatches of *size* rows; changes nothing."""
        saved = {n: b.clone() for n, b in self.model.named_buffers()}
        self.model.eval()
        losses, weights = [], []
        with torch.no_grad():
            for start in range(0, count_rows(inputs), size):
                part = rows_of((inputs, targets), start, start + size)
                loss, weight, _ = self._forward(*part, None)
                losses.append(float(loss))
                weights.append(weight)
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(saved[name])
        self.model.train()
        return sum(losses) / sum(weights)

    def _rescale(self, skipped):
        types = self.options.types
        if self.scale is None:
            return
        if skipped:
            self.scale, self.good = self.scale * types.backoff, 0
            return
        self.good += 1
        if self.good >= types.interval:
            self.scale, self.good = self.scale * types.growth, 0

    def _gradients(self, inputs, targets, replicas, microbatches, buffers):
        count = replicas * microbatches
        size, rest = divmod(count_rows(inputs), count)
        assert not rest
        start = {n: b.clone() for n, b in self.model.named_buffers()}
        ends = []
        losses, weights, summed = 0.0, 0.0, {}
        mean = True
        for replica in range(replicas):
            for name, buffer in self.model.named_buffers():
                buffer.copy_(start[name])
            for m in range(replica * microbatches, (replica + 1) * microbatches):
                part = rows_of((inputs, targets), m * size, (m + 1) * size)
                draw = DrawnNumbers(self.options.seed + (self.kept << 32), self.steps, m)
                loss, weight, uses = self._forward(*part, draw)
                mean = mean and weight is None
                seed = (1 / count if weight is None else 1.0) * (self.scale or 1.0)
                for name, gradient in self._backward(loss, uses, seed).items():
                    summed[name] = summed[name] + gradient if name in summed else gradient
                losses += float(loss.detach())
                weights += 1.0 if weight is None else weight
            ends.append({n: b.clone() for n, b in self.model.named_buffers()})
        self._combine(start, ends, buffers)
        if not mean:
            if weights == 0:
                raise Diverged("no weight at all")
            summed = {name: gradient / weights for name, gradient in summed.items()}
        return losses / weights, summed

    def _combine(self, start, ends, buffers):
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                states = [end[name] for end in ends]
                if all(torch.equal(state, start[name]) for state in states):
                    buffer.copy_(start[name])
                elif buffers == "first":
                    buffer.copy_(states[0])
                elif buffers == "sum":
                    buffer.copy_(start[name] + sum(state - start[name] for state in states))
                else:
                    buffer.copy_(
                        (sum(state.double() for state in states) / len(states)).to(buffer.dtype)
                    )

    def _forward(self, inputs, targets, draw):
        """Loss, its weight (``None``: a mean), and what stands for each use of a parameter."""
        types = self.options.types
        uses = []
        with draw or nullcontext():
            if types is None:
                uses = list(self.model.named_parameters())
                outputs = call(self.model, inputs)
            else:
                # A copy under each name of a parameter: gradients of each are summed in `reduce`.
                names = {id(p): n for n, p in self.model.named_parameters()}
                named = list(self.model.named_parameters(remove_duplicate=False))
                short = {}
                for name, parameter in named:
                    made = parameter.detach().to(types.compute)
                    made = made.clone().requires_grad_(parameter.requires_grad)
                    short[name] = made
                    uses.append((names[id(parameter)], made))
                inputs = cast(inputs, types.compute)
                arguments, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
                outputs = torch.func.functional_call(
                    self.model, short, arguments, keywords, tie_weights=False
                )
                outputs = cast(outputs, types.output)
            result = self.loss_fn(outputs, targets)
        if isinstance(result, tuple):
            return result[0], float(result[1]), uses
        return result, None if draw is not None else 1.0, uses

    def _backward(self, loss, uses, seed):
        types = self.options.types
        trained = [(name, t) for name, t in uses if t.requires_grad]
        if not loss.requires_grad:
            return {}
        found = torch.autograd.grad(
            loss, [t for _, t in trained], torch.full_like(loss, seed), allow_unused=True
        )
        summed = {}
        for (name, _), gradient in zip(trained, found, strict=True):
            if gradient is not None:
                own = gradient if types is None else gradient.to(types.reduce)
                summed[name] = summed[name] + own if name in summed else own
        return summed

    def _require_finite(self, loss, skipped):
        if skipped:
            return
        if not math.isfinite(loss) or abs(loss) > HUGE:
            raise Diverged(f"loss {loss:.1e}")
        for name, parameter in self.model.named_parameters():
            largest = float(parameter.detach().abs().max()) if parameter.numel() else 0.0
            if not largest < HUGE:
                raise Diverged(f"{name} has {largest:.1e}")

    # --- what it has ---------------------------------------------------------------------------

    def state(self):
        """Parameters and buffers under all their names."""
        model = self.model
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        return {name: tensor.detach().clone() for name, tensor in named}

    def optimizer_state(self):
        """Tensors of the optimizer's state by parameter and entry."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[name, key] = torch.as_tensor(value).clone()
        return found
