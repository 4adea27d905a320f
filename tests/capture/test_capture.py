"""One captured step equals eager PyTorch, and falls into the chunks that a reader expects."""

import copy
from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from tests.capture.reference import Batch, check, compare, labels, pipeline, run_dag, run_eager
from torch import nn

from piper.capture import annotate, annotate_module, capture, capture_with_constants
from piper.ir.body import Body
from piper.ir.dag import LossKind, Pass, Role

D = torch.float64
WIDTH = 6


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias, dtype=D)


def vectors(rows: int) -> Batch:
    return torch.randn(rows, WIDTH, dtype=D), torch.randn(rows, WIDTH, dtype=D)


def tokens(rows: int) -> Batch:
    return torch.randint(0, 50, (rows, 5)), torch.randint(0, 50, (rows, 5))


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class MLP(nn.Module):
    def __init__(self, stages: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear() for _ in range(stages)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(layer(x))
        return x


def test_mlp_has_one_chunk_per_stage_and_pass() -> None:
    dag = check(MLP(), F.mse_loss, vectors, chunks=pipeline(4))
    forward = [n.work for n in dag.chunks() if n.pass_ is Pass.FORWARD]
    assert len({work.body for work in forward[:3]}) == 1
    backward = [n.work for n in dag.chunks() if n.pass_ is Pass.BACKWARD]
    assert len({work.body for work in backward[1:3]}) == 1
    assert dag.guards == ("B >= 2",)


def test_model_without_regions_is_one_chunk_per_pass() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    check(model, F.mse_loss, vectors, chunks=["F", "B"])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = self.layers
        with annotate("PP"):
            a = torch.tanh(first(x))
        with annotate("PP"):
            b = torch.tanh(second(a))
        with annotate("PP"):
            c = torch.tanh(third(b)) + b
        with annotate("PP"):
            return fourth(c) + a


def test_skip_connections() -> None:
    check(UNet(), F.mse_loss, vectors, chunks=pipeline(4))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, expert: bool) -> None:
        super().__init__()
        self.heads = heads
        self.expert = expert
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        fused = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        if not self.expert:
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        h = self.norm2(x)
        with annotate("EP"):
            h = self.down(F.gelu(self.up(h)))
        return x + h


class GPT(nn.Module):
    def __init__(
        self,
        *,
        layers: int = 4,
        stages: int = 2,
        tied: bool = True,
        expert: bool = False,
        ends_inside: bool = True,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.position = nn.Embedding(5, 16)
        self.blocks = nn.ModuleList([Block(16, 2, expert) for _ in range(layers)])
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.stages = stages
        self.ends_inside = ends_inside
        self.double()

    def start(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        per_stage = len(self.blocks) // self.stages
        x = ids if self.ends_inside else self.start(ids)
        for stage in range(self.stages):
            with annotate("PP"):
                if stage == 0 and self.ends_inside:
                    x = self.start(x)
                for block in self.blocks[stage * per_stage : (stage + 1) * per_stage]:
                    x = block(x)
                if stage == self.stages - 1 and self.ends_inside:
                    x = self.head(x)
        return x if self.ends_inside else self.head(x)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ends_inside", [True, False])
def test_gpt(tied: bool, ends_inside: bool) -> None:
    model = GPT(tied=tied, ends_inside=ends_inside)
    dag = check(model, cross_entropy, tokens, chunks=pipeline(2))
    assert len(dag.contributions["embed.weight"]) == (2 if tied else 1)
    assert "head.weight" not in dag.parameters if tied else "head.weight" in dag.contributions
    if tied:
        assert dag.parameters["embed.weight"].aliases == ("head.weight",)


def test_same_layer_has_one_body() -> None:
    dag = check(GPT(stages=4), cross_entropy, tokens, chunks=pipeline(4))
    bodies = {n.label: n.work.body for n in dag.chunks()}
    assert bodies["F PP=1"] == bodies["F PP=2"]
    assert bodies["B PP=1"] == bodies["B PP=2"]


def test_nested_regions_split_their_parent() -> None:
    dag = check(GPT(expert=True), cross_entropy, tokens)
    forward: list[str] = []
    for stage in range(2):
        for expert in (2 * stage, 2 * stage + 1):
            forward += [f"F PP={stage}", f"F PP={stage} EP={expert}"]
        forward.append(f"F PP={stage}")
    backward = ["B" + label[1:] for label in reversed(forward)]
    # After the last expert of stage 0 only "x + h" is left, whose backward computes nothing.
    backward.remove("B PP=0")
    assert labels(dag) == forward + backward


class Several(nn.Module):
    """Several inputs and outputs per region; integer, boolean and strided boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.register_buffer("table", torch.linspace(0, 1, WIDTH, dtype=D), persistent=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h, mask = self.a(x), x > 0
            aux, table, flipped = h.sin(), (self.table * 2).cos(), ids.flip(1)
        with annotate("PP"):
            h = self.b(h).transpose(0, 1)
        with annotate("PP"):
            h = (self.c(h.transpose(0, 1)) * mask + aux * table).gather(1, flipped)
            return h.transpose(0, 1).transpose(0, 1)


def test_several_values_across_boundaries() -> None:
    def batch(rows: int) -> Batch:
        inputs = (torch.randn(rows, WIDTH, dtype=D), torch.randint(0, WIDTH, (rows, WIDTH)))
        return inputs, torch.randn(rows, WIDTH, dtype=D)

    dag = check(Several(), F.mse_loss, batch, chunks=pipeline(3))
    assert not dag.buffers["table"].persistent
    assert [leaf.name for leaf in dag.batch] == ["inputs[0]", "inputs[1]", "targets"]


class Twice(nn.Module):
    """One weight used twice in a region and again in the next, where the first op is in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=D))
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = self.layer(x @ self.weight @ self.weight)
        with annotate("PP"):
            x.relu_()
            return x @ self.weight


def test_weight_used_within_and_across_regions() -> None:
    dag = check(Twice(), F.mse_loss, vectors, chunks=pipeline(2))
    assert len(dag.contributions["weight"]) == 2


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.a(x)
        with annotate("PP"):
            h.add_(0.1)
            h.relu_()
            h = self.b(h)
            h[:, 0] = 0.5
            return h


def test_in_place_operation_first_in_a_region() -> None:
    check(InPlaceFirst(), F.mse_loss, vectors, chunks=pipeline(2))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = linear(), linear(), linear()
        self.a.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = torch.tanh(self.a(x))
        with annotate("PP"):
            x = torch.relu(x)
        with annotate("PP"):
            return self.b(x)


def test_frozen_and_unused_parameters_and_stages_without_parameters() -> None:
    dag = check(Frozen(), F.mse_loss, vectors, chunks=["F PP=0", "F PP=1", "F PP=2", "B PP=2"])
    assert set(dag.contributions) == {"b.weight", "b.bias"}
    assert not dag.parameters["a.weight"].requires_grad
    assert dag.parameters["unused.weight"].requires_grad


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = linear(), nn.BatchNorm1d(WIDTH, dtype=D), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = self.norm(self.a(x))
        with annotate("PP"):
            return self.b(x)


@pytest.mark.parametrize("train", [True, False])
def test_batch_norm(train: bool) -> None:
    model = Norm().train(train)
    model.norm.running_mean.normal_()
    dag = check(model, F.mse_loss, vectors, chunks=pipeline(2))
    written = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(dag.buffer_updates) == (written if train else set())
    for value in dag.buffer_updates.values():
        assert dag.nodes[dag.producers[value]].label == "F PP=0"
    if train:
        for chunk in dag.chunks():
            reads_state = any(dag.values[v].role is Role.BUFFER for v in chunk.inputs)
            assert reads_state == (chunk.label == "F PP=0")


class Counter(nn.Module):
    """A buffer that is assigned, one that is written in place, one that nothing else reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=D))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("flag", torch.zeros((), dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.a(x)
        with annotate("PP"):
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            self.steps += 1
            h = self.b(h) * self.mean
        self.flag.fill_(True)
        return h


def test_written_buffers() -> None:
    dag = check(Counter(), F.mse_loss, vectors, chunks=pipeline(2))
    assert set(dag.buffer_updates) == {"mean", "steps", "flag"}


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH, dtype=D), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            u, v = self.a(x).chunk(2, -1)
            w, z = torch.stack([u, v]).unbind(0)
            x = u.sigmoid() * v + w
        with annotate("PP"):
            return self.b(x) + z


def test_chunk_and_unbind() -> None:
    check(Chunked(), F.mse_loss, vectors, chunks=pipeline(2))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.exp()

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 0.5 * g * x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = Scaled.apply(self.a(x))
        with annotate("PP"):
            return Scaled.apply(self.b(x))


def test_custom_autograd_function() -> None:
    check(Custom(), F.mse_loss, vectors, chunks=pipeline(2))


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            x = F.dropout(torch.tanh(self.a(F.dropout(x, 0.2, self.training))), 0.3, self.training)
        with annotate("PP"):
            return F.dropout(self.b(x + 0.1 * torch.randn_like(x)), 0.5, self.training)


def test_random_operators_keep_their_ordinals() -> None:
    dag = check(Dropped(), F.mse_loss, vectors, chunks=pipeline(2))
    assert [n.work.rng for n in dag.chunks()] == [(0, 1), (2, 3), (), ()]


def test_evaluation_mode_has_no_dropout() -> None:
    dag = check(Dropped().eval(), F.mse_loss, vectors, chunks=pipeline(2))
    assert [n.work.rng for n in dag.chunks()] == [(), (0,), (), ()]


def test_forward_only() -> None:
    check(Dropped().eval(), F.mse_loss, vectors, chunks=["F PP=0", "F PP=1"], grad=False)
    check(Norm(), F.mse_loss, vectors, chunks=["F PP=0", "F PP=1"], grad=False)


class Keywords(nn.Module):
    """Keyword arguments of every kind: a mask and a table that are not split, a flag, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(
        self,
        x: torch.Tensor,
        *,
        mask: torch.Tensor,
        positions: torch.Tensor,
        scale: float,
        extra: dict[str, torch.Tensor | None],
    ) -> dict[str, torch.Tensor | None]:
        with annotate("PP"):
            h = self.a(x) * mask + positions.cos()
        with annotate("PP"):
            h = self.b(h) * mask * scale + extra["table"]
        return {"h": h, "nothing": None}


def test_keyword_arguments() -> None:
    def batch(rows: int) -> Batch:
        inputs = {
            "x": torch.randn(rows, WIDTH, dtype=D),
            "mask": torch.arange(WIDTH) % 2 == 0,
            "positions": torch.arange(WIDTH, dtype=D).expand(rows, WIDTH),
            "scale": 0.5,
            "extra": {"table": torch.ones(3, 1, WIDTH, dtype=D)[0], "unused": None},
        }
        return inputs, {"labels": torch.randn(rows, WIDTH, dtype=D)}

    def loss(outputs: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(outputs["h"], targets["labels"])

    dims = {"mask": None, "extra.table": None}
    dag = check(Keywords(), loss, batch, chunks=pipeline(2), batch_dims=dims)
    assert {leaf.name: leaf.batch_dim for leaf in dag.batch} == {
        "inputs.x": 0,
        "inputs.mask": None,
        "inputs.positions": 0,
        "inputs.extra.table": None,
        "targets.labels": 0,
    }
    # Each region takes batch inputs from the batch.
    for chunk in dag.chunks():
        for value in chunk.inputs:
            if dag.values[value].name == "inputs.mask":
                assert dag.values[value].role is Role.INPUT


def test_weighted_loss() -> None:
    def batch(rows: int) -> Batch:
        ids, targets = tokens(rows)
        return ids, torch.where(torch.rand(rows, 5) < 0.5, -100, targets)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
        return total, (targets != -100).sum()

    dag = check(GPT(), loss, batch, chunks=pipeline(2))
    assert dag.loss_kind is LossKind.WEIGHTED
    assert dag.nodes[dag.producers[dag.weights[0]]].label == "F PP=1"


def test_weight_may_be_a_count() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        return F.mse_loss(outputs, targets, reduction="sum"), targets.numel()

    check(MLP(2), loss, vectors, chunks=pipeline(2))


class Bias(nn.Module):
    """The gradients of both biases are the very gradient that arrives from the next region."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(WIDTH, dtype=D))
        self.y = nn.Parameter(torch.randn(WIDTH, dtype=D))
        self.z = nn.Parameter(torch.randn(WIDTH, dtype=D))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.x.sin()
        with annotate("PP"):
            h = h + self.y + self.z
        with annotate("PP"):
            return rows * h


def test_contributions_stay_in_regions_that_have_the_parameter() -> None:
    dag = check(Bias(), F.mse_loss, vectors, chunks=pipeline(3))
    for name in ("y", "z"):
        (part,) = dag.contributions[name]
        assert dag.nodes[dag.producers[part]].label == "B PP=1"


class Auxiliary(nn.Module):
    """Each stage adds to a loss that is summed up at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        losses = []
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(layer(x))
                losses.append(x.pow(2).mean())
        return x, losses


def test_auxiliary_losses() -> None:
    def loss(outputs: tuple[torch.Tensor, list[torch.Tensor]], y: torch.Tensor) -> torch.Tensor:
        x, losses = outputs
        return F.mse_loss(x, y) + 0.01 * sum(losses)

    check(Auxiliary(), loss, vectors, chunks=pipeline(3))


class Shared(nn.Module):
    """A mask and a rotary table, made from the batch outside all regions and used by every
    stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear() for _ in range(3)])
        self.register_buffer("frequencies", torch.linspace(0.1, 1, WIDTH, dtype=D))
        self.constant = torch.linspace(-1, 1, 100 * WIDTH, dtype=D).reshape(100, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        table = (positions[:, None] * self.frequencies).cos()
        mask = (x > 0).to(x.dtype) * torch.tensor([1.0, 0.5, 1.0, 0.5, 1.0, 0.5])
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x) * mask * table + self.constant[:1]
        return x


def test_tables_outside_regions_are_computed_where_they_are_used() -> None:
    def batch(rows: int) -> Batch:
        x, y = vectors(rows)
        return (x, torch.arange(rows)), y

    dag = check(Shared(), F.mse_loss, batch, chunks=pipeline(3))
    for stage in range(1, 3):
        chunk = dag.nodes[stage]
        sent = [v for v in chunk.inputs if v in dag.producers]
        assert len(sent) == 1, "only the activation goes from stage to stage"
    assert not dag.buffers["constant.0"].persistent


class Early(nn.Module):
    """A region that computes something of its own before the activation arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.a(x).pow(3)
        with annotate("PP"):
            mask = x.abs() > 0.5
            scale = self.scale.exp() * 2
            return self.b(h) * mask * scale


def test_region_that_starts_early_is_one_chunk() -> None:
    check(Early(), F.mse_loss, vectors, chunks=pipeline(2))


class Autocast(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Eager autocast casts a weight once for all its uses and adds their gradients in the short
        # type.
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            for index, layer in enumerate(self.layers):
                with annotate("PP"):
                    x = torch.tanh(layer(x))
                    if index == 1:
                        x = x + layer(x)
        return x.float()


def test_autocast() -> None:
    def batch(rows: int) -> Batch:
        return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)

    dag = check(Autocast(3).float(), F.mse_loss, batch, chunks=pipeline(3), tolerance=1e-6)
    casts = [v for v in dag.values.values() if v.role is Role.ACTIVATION and len(v.spec.shape) == 2]
    assert all(str(v.spec.shape[0]) == "B" for v in casts), "casts of weights are not sent or saved"


class Checkpointed(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.dropout = dropout

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(self.b(torch.tanh(self.a(x)))), self.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with annotate("PP"):
                x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return x


def test_checkpoint_without_reentry() -> None:
    check(Checkpointed(), F.mse_loss, vectors, chunks=pipeline(2))


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.b.register_full_backward_hook(lambda _m, inputs, _o: tuple(3 * g for g in inputs))
        self.b.register_full_backward_pre_hook(lambda _m, outputs: tuple(5 * g for g in outputs))
        self.c.register_forward_hook(lambda _m, _i, output: output * 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.a(x)
            h.register_hook(lambda g: g * 2)
        with annotate("PP"):
            h = self.b(h)
        with annotate("PP"):
            return self.c(h)


def test_hooks_are_kept() -> None:
    check(Hooked(), F.mse_loss, vectors, chunks=pipeline(3))


class Leaky(nn.Module):
    """Keeps intermediate results in every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear()
        self.last: torch.Tensor | None = None
        self.calls, self.history, self.cache = 0, [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.a(x)
        self.calls += 1
        self.history.append(self.last)
        self.cache["last"] = self.last
        self.extra = self.last
        return self.last


def test_capture_leaves_the_model_as_it_was() -> None:
    model = Leaky()
    handle = model.a.register_full_backward_hook(lambda _m, inputs, _o: inputs)
    before = dict(vars(model))
    capture(model, F.mse_loss, vectors(4))
    assert vars(model) == before
    assert (model.last, model.calls, model.history, model.cache) == (None, 0, [], {})
    assert type(model.a.weight) is nn.Parameter
    handle.remove()
    assert not model.a._backward_hooks, "handles of hooks still work"
    dropped, batch = Dropped(), vectors(4)
    random = torch.get_rng_state()
    capture(dropped, F.mse_loss, batch)
    assert torch.equal(torch.get_rng_state(), random)
    model.eval()
    capture(model, F.mse_loss, batch)
    assert not model.training


def test_annotate_module_matches_annotations_inside() -> None:
    model = nn.Sequential(*[nn.Sequential(linear(), nn.Tanh()) for _ in range(3)])
    for index, layer in enumerate(model):
        annotate_module(layer, "PP", index)
    dag = check(model, F.mse_loss, vectors, chunks=pipeline(3))
    inside = capture(MLP(3), F.mse_loss, vectors(4))
    assert [n.work for n in dag.chunks()] == [n.work for n in inside.chunks()]


def test_meta_model_gives_the_same_dag() -> None:
    real = GPT(layers=2)
    dag = capture(real, cross_entropy, tokens(4))
    with torch.device("meta"):
        meta = GPT(layers=2)
    captured = capture_with_constants(meta, cross_entropy, tokens(4))
    assert captured.dag == dag
    assert all(p.is_meta for p in meta.parameters())
    batch = tokens(3)
    compare(run_dag(captured, real, batch, None), run_eager(real, cross_entropy, batch), real)


def test_captures_are_equal() -> None:
    model = GPT(layers=2, expert=True)
    assert capture(model, cross_entropy, tokens(4)) == capture(
        copy.deepcopy(model), cross_entropy, tokens(4)
    )


class Constants(nn.Module):
    """Tensors that are not registered: small, uniform, infinite, large."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.large = torch.linspace(-1, 1, 100 * WIDTH, dtype=D).reshape(100, WIDTH)
        self.ones = torch.ones(50, WIDTH, dtype=D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocked = torch.tensor([True, False] * 3)
        ramp = torch.tensor([0.1 * i for i in range(WIDTH)])
        for layer in (self.a, self.b):
            with annotate("PP"):
                x = layer(x).masked_fill(blocked, float("-inf")).softmax(-1)
                x = x + torch.where(x > 0, torch.tensor(float("-inf")), ramp).exp()
                x = x * self.large[3] + self.ones[0] + torch.arange(WIDTH).double().outer(ramp)[2]
        return x


def test_constants() -> None:
    dag = check(Constants(), F.mse_loss, vectors, chunks=pipeline(2))
    assert list(dag.buffers) == ["constant.0"]
    captured = capture_with_constants(Constants(), F.mse_loss, vectors(4))
    assert captured.constants["constant.0"].shape == (100, WIDTH)


def test_bodies_survive_json() -> None:
    for model, loss, batch in (
        (Constants(), F.mse_loss, vectors),
        (GPT(), cross_entropy, tokens),
        (Dropped(), F.mse_loss, vectors),
    ):
        for body in capture(model, loss, batch(4)).bodies.values():
            assert msgspec.json.decode(msgspec.json.encode(body), type=Body) == body


class Sizes(nn.Module):
    """Arithmetic on the batch size, in shapes and in values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        with annotate("PP"):
            h = self.a(x.reshape(-1)[: x.numel()].view(rows, -1)) / rows
        with annotate("PP"):
            h = torch.cat([h, x], 0).reshape(rows * 4, 3).reshape(-1, WIDTH)[:rows]
            return self.b(h) * rows**0.5 + torch.ones(rows, 1, dtype=D).cumsum(0)


def test_arithmetic_on_the_batch_size() -> None:
    check(Sizes(), F.mse_loss, vectors, chunks=pipeline(2))


@torch.library.custom_op("piper_test::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _cube_backward(ctx, g: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    with annotate("PP"):  # the forward is over: this does not count a third region
        return g * 3 * x * x


cube.register_autograd(
    _cube_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b):
            with annotate("PP"):
                x = cube(layer(x))
        return x


def test_custom_operator() -> None:
    dag = check(Registered(), F.mse_loss, vectors, chunks=pipeline(2))
    targets = {call.target for body in dag.bodies.values() for call in body.calls}
    assert "piper_test.cube.default" in targets


class Shaped(nn.Module):
    """A module applied to the rows seen in another shape."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.inner, self.last = linear(), inner, linear()
        self.shape = shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.first(x).view(-1, *self.shape)
        with annotate("PP"):
            h = self.inner(h)
            h = h[0] if isinstance(h, tuple) else h
        with annotate("PP"):
            return self.last(h.flatten(1))


@pytest.mark.parametrize(
    ("inner", "shape"),
    [
        (lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dtype=D), (1, WIDTH)),
        (lambda: nn.GRU(2, 2, batch_first=True, dtype=D), (3, 2)),
        (lambda: nn.TransformerEncoderLayer(2, 1, 8, batch_first=True, dtype=D), (3, 2)),
        (lambda: nn.Conv2d(1, 1, 3, padding=1, dtype=D), (1, 2, 3)),
        (lambda: nn.ConvTranspose1d(2, 2, 3, padding=1, dtype=D), (2, 3)),
        (lambda: nn.BatchNorm2d(1, dtype=D), (1, 2, 3)),
        (lambda: nn.GroupNorm(2, 2, dtype=D), (2, 3)),
        (lambda: nn.utils.parametrizations.weight_norm(linear()), (WIDTH,)),
        (lambda: nn.PReLU(dtype=D), (WIDTH,)),
    ],
)
def test_modules(inner: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    check(Shaped(inner(), shape), F.mse_loss, vectors, chunks=pipeline(3))


def test_module_shared_by_regions() -> None:
    layer = linear()
    model = nn.Sequential(layer, nn.Tanh(), linear(), nn.Tanh(), layer)
    for index, part in enumerate((model[1], model[2], model[3])):
        annotate_module(part, "PP", index)
    dag = check(model, F.mse_loss, vectors, chunks=pipeline(3))
    assert len(dag.contributions["0.weight"]) == 2
    assert dag.parameters["0.weight"].aliases == ("4.weight",)


class Turn(nn.Module):
    """A region that the model leaves and enters again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([linear() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, stage in zip(self.layers, (0, 1, 1, 0), strict=True):
            with annotate("PP", stage):
                x = torch.tanh(layer(x))
        return x


def test_region_entered_again() -> None:
    forward = ["F PP=0", "F PP=1", "F PP=0"]
    check(Turn(), F.mse_loss, vectors, chunks=[*forward, "B PP=0", "B PP=1", "B PP=0"])


class Branches(nn.Module):
    """Parallel branches: neither waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("PP"):
            h = self.a(x)
        with annotate("BRANCH"):
            u = self.b(h).tanh()
        with annotate("BRANCH"):
            v = self.c(h).tanh()
        y = u + v * 2
        with annotate("PP"):
            return self.d(y)


def test_parallel_branches() -> None:
    forward = ["F PP=0", "F BRANCH=0", "F BRANCH=1", "F PP=1"]
    backward = ["B PP=1", "B BRANCH=1", "B BRANCH=0", "B PP=0"]
    dag = check(Branches(), F.mse_loss, vectors, chunks=forward + backward)
    node = {n.label: n.id for n in dag.chunks()}
    for pass_ in "FB":
        one, other = node[f"{pass_} BRANCH=0"], node[f"{pass_} BRANCH=1"]
        assert one not in dag.predecessors[other]
        assert other not in dag.predecessors[one]
