"""What crosses the boundary between two stages, and in which form."""

import pytest
import torch
from tests.cases.equal import adamw, assert_equal, mse, randint, randn
from torch import nn
from torch.nn import functional

import piper

pytestmark = pytest.mark.timeout(90)


def pipeline(stages: int, microbatches: int = 4, replicas: int = 1, schedule: str = "1f1b"):
    groups = [[s * replicas + r for r in range(replicas)] for s in range(stages)]
    return piper.strategies.pipeline(schedule, groups, microbatches)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tensor_that_the_next_stage_only_passes_on(replicas):
    """(h, aux) from stage 0; stage 1 does not use aux; stage 2 does."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.aux = nn.Linear(3, 4)

        def forward(self, x):
            with piper.annotate("PP", 0):
                h, aux = self.a(x).tanh(), self.aux(x).tanh()
            with piper.annotate("PP", 1):
                h = self.b(h).tanh()
            with piper.annotate("PP", 2):
                return self.c(h * aux)

    batch = (randn(8, 3), randn(8, 2, seed=1))
    assert_equal(Model(), mse, pipeline(3, replicas=replicas), batch)


def test_ids_masks_and_tables_without_a_gradient():
    """A stage returns (h, int64 ids, bool mask, float table); only h has a gradient."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.embedding = nn.Embedding(4, 4)

        def forward(self, x):
            with piper.annotate("PP", 0):
                h = self.a(x)
                ids, mask = h.argmax(-1), h > 0
                table = h.detach().softmax(-1)
            with piper.annotate("PP", 1):
                h = self.b(h).masked_fill(mask, 0.5) + table
            with piper.annotate("PP", 2):
                return self.c(h.tanh() + self.embedding(ids) * mask)

    assert_equal(Model(), mse, pipeline(3), (randn(8, 3), randn(8, 2, seed=1)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("combine", [torch.add, torch.mul])
def test_skip_connections_across_stages(schedule, combine):
    """A U over four stages: 0 → 3 and 1 → 2. (Added skips have no saved tensor at all, multiplied
    ones have.)
    """

    class U(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

        def forward(self, x):
            outputs = []
            for stage, linear in enumerate(self.stages):
                with piper.annotate("PP", stage):
                    x = linear(x).tanh()
                    if stage >= 2:
                        x = combine(x, outputs[3 - stage])
                    outputs.append(x)
            return x

    assert_equal(U(), mse, pipeline(4, schedule=schedule), (randn(8, 3), randn(8, 3, seed=1)))


@pytest.mark.parametrize("split", ["chunk", "unbind", "split"])
def test_the_parts_of_a_multi_output_operation_go_to_different_stages(split):
    """A fused projection; one part stays, the other is needed one stage on: their gradients come
    from two devices.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.b, self.c = nn.Linear(3, 8), nn.Linear(4, 4), nn.Linear(4, 2)

        def parts(self, y):
            if split == "chunk":
                return y.chunk(2, dim=-1)
            if split == "split":
                return y.split([4, 4], dim=-1)
            return y.unflatten(-1, (2, 4)).unbind(-2)

        def forward(self, x):
            with piper.annotate("PP", 0):
                gate, value = self.parts(self.fused(x))
                gate = functional.silu(gate)
            with piper.annotate("PP", 1):
                h = self.b(gate)
            with piper.annotate("PP", 2):
                return self.c(h * value)

    assert_equal(Model(), mse, pipeline(3), (randn(8, 3), randn(8, 2, seed=1)))


class Strided(nn.Module):
    """Stage 0 hands over a view that is not contiguous."""

    def __init__(self, view) -> None:
        super().__init__()
        self.view = view
        self.a, self.b = nn.Linear(4, 6), nn.LazyLinear(2)
        self.b(view(torch.zeros(2, 5, 6)))

    def forward(self, x):
        with piper.annotate("PP", 0):
            h = self.view(self.a(x))
        with piper.annotate("PP", 1):
            return self.b(h.tanh()).flatten(1).sum(-1)


VIEWS = {
    "transpose": lambda h: h.transpose(1, 2),
    "expand": lambda h: h.mean(1, keepdim=True).expand(-1, 7, -1),
    "second chunk": lambda h: h.chunk(2, dim=-1)[1],
    "step": lambda h: h[:, ::2, 1::2],
    "flip": lambda h: h.flip(1),
    "permuted channels": lambda h: h.unflatten(-1, (2, 3)).permute(0, 3, 1, 2).flatten(2),
    "select": lambda h: h[:, 1],
    "broadcast to batch": lambda h: h.mean(0, keepdim=True).expand_as(h),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_that_are_not_contiguous(view):
    torch.manual_seed(0)
    batch = (randn(8, 5, 4), randn(8, seed=1))
    assert_equal(Strided(VIEWS[view]), mse, pipeline(2), batch)


@pytest.mark.parametrize("where", ["input", "boundary", "batch"])
def test_a_stage_that_begins_with_an_in_place_operation(where):
    """On what the stage before it made, on a view of that, or on a batch tensor's copy. Five
    steps.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            with piper.annotate("PP", 0):
                if where == "batch":
                    x = x * 1.0
                    x.clamp_(-1.0, 1.0)
                h = self.a(x)
                h = h.view(-1, 2, 2) if where == "boundary" else h
            with piper.annotate("PP", 1):
                h.mul_(2.0)
                h.relu_()
                return self.b(h.flatten(1))

    assert_equal(
        Model(), mse, pipeline(2), (randn(8, 3), randn(8, 2, seed=1)), optimizer=adamw, steps=5
    )


def test_every_stage_needs_the_keyword_arguments():
    """A mask, position ids and a flag reach the later stages from the loader, not from stage to
    stage.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.stages = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.positions = nn.ModuleList([nn.Embedding(5, 4) for _ in range(3)])

        def forward(self, ids, *, mask, position_ids, scaled, shift=None):
            for stage in range(3):
                with piper.annotate("PP", stage):
                    h = self.embedding(ids) if stage == 0 else h  # noqa: F821 (set in stage 0)
                    h = self.stages[stage](h) + self.positions[stage](position_ids)
                    h = torch.where(mask.unsqueeze(-1), h.tanh(), torch.zeros_like(h))
                    h = h * 0.5 if scaled else h
                    h = h if shift is None else h + shift
            return h

    inputs = {
        "ids": randint(7, 8, 5),
        "mask": randint(4, 8, 5, seed=1) > 0,
        "position_ids": randint(5, 8, 5, seed=2),
    }
    for flags in ({"scaled": True}, {"scaled": False, "shift": 0.25}):
        assert_equal(
            Model(), mse, pipeline(3), ({**inputs, **flags}, randn(8, 5, 4, seed=3)), steps=2
        )


def test_a_boundary_tensor_that_two_later_stages_and_the_loss_read():
    """One value, many readers on other devices: their gradients are summed on its device, each
    counted once.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])

        def forward(self, x):
            with piper.annotate("PP", 0):
                first = self.stages[0](x).tanh()
            h = first
            for stage in range(1, 4):
                with piper.annotate("PP", stage):
                    h = self.stages[stage](h * first).tanh() + first
            return h, first

    def loss_fn(outputs, targets):
        h, first = outputs
        return functional.mse_loss(h, targets) + first.square().mean()

    assert_equal(Model(), loss_fn, pipeline(4, replicas=2), (randn(16, 3), randn(16, 3, seed=1)))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tensor_that_is_not_split(replicas):
    """A mask over positions goes whole to every microbatch of every replica, and to every stage."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

        def forward(self, x, mask):
            for stage, linear in enumerate(self.stages):
                with piper.annotate("PP", stage):
                    x = mask @ linear(x).tanh()
            return x

    torch.manual_seed(0)
    mask, x, y = torch.rand(4, 4).tril(), randn(8, 4, 3), randn(8, 4, 3, seed=1)
    strategy = pipeline(2, microbatches=2, replicas=replicas)
    report = piper.check(
        Model(), mse, strategy, ((x, mask), y), optimizer=adamw, batch_dims={"mask": None}
    )
    assert report.ok
    assert report.whole_batch_difference < 1e-12
    with pytest.raises(piper.PiperError, match="batch size"):
        piper.check(Model(), mse, strategy, ((x, mask), y), optimizer=adamw)
