import pytest
import torch
from torch import nn

import piper
from piper.capture.precision import PRECISIONS, cast, holds, make_precision
from piper.dtypes import DType
from piper.errors import ConfigError
from piper.ir.dag import Role

X, Y = torch.randn(4, 3), torch.randn(4, 3)


def test_the_named_policies():
    bf16, fp16 = make_precision("bf16"), make_precision("fp16")
    assert bf16 == piper.Precision()
    assert (bf16.compute, bf16.reduce, bf16.master, bf16.output, bf16.loss_scale) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
        torch.float32,
        None,
    )
    assert (fp16.compute, fp16.reduce) == (torch.float16, torch.float32)
    assert fp16.loss_scale == piper.LossScale(2.0**16, 2.0, 0.5, 2000)
    for name in ("float32", "float64"):
        policy, dtype = make_precision(name), getattr(torch, name)
        assert {policy.compute, policy.reduce, policy.master, policy.output} == {dtype}
    assert make_precision(None) is None
    assert make_precision(bf16) is bf16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compute": torch.int64}, ["compute", "floating-point", "torch.int64"]),
        ({"output": torch.complex64}, ["output", "floating-point", "torch.complex64"]),
        ({"reduce": "float31"}, ["reduce", "floating-point", "'float31'", "'float32'"]),
        ({"reduce": torch.float8_e5m2}, ["reduce", "floating-point", "torch.float8_e5m2"]),
        ({"compute": None}, ["compute", "floating-point", "None"]),
        ({"compute": torch.float64}, ["master (torch.float32)", "compute (torch.float64)"]),
        ({"reduce": torch.float16}, ["reduce (torch.float16)", "compute (torch.bfloat16)"]),
        (
            {"compute": torch.float16, "master": torch.bfloat16},
            ["master (torch.bfloat16)", "compute (torch.float16)"],
        ),
        (
            {
                "compute": torch.float16,
                "reduce": torch.float16,
                "loss_scale": piper.LossScale(),
            },
            ["loss_scale", "reduce=torch.float32"],
        ),
        ({"loss_scale": 1024.0}, ["LossScale", "1024.0"]),
    ],
)
def test_a_policy_that_makes_no_sense(options, words):
    with pytest.raises(ConfigError) as error:
        piper.Precision(**options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"init": 0.0}, "init"),
        ({"init": float("inf")}, "init"),
        ({"growth": 1.0}, "growth"),
        ({"backoff": 1.0}, "backoff"),
        ({"backoff": 0.0}, "backoff"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"growth_interval": 1.5}, "growth_interval"),
        ({"growth_interval": True}, "growth_interval"),
    ],
)
def test_a_loss_scale_that_makes_no_sense(options, word):
    with pytest.raises(ConfigError, match=rf"LossScale\({word}=…\).*found"):
        piper.LossScale(**options)


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"name of one \(.*\bhalf\b.*found 'fp61'.*mean 'fp16'"):
        make_precision("fp61")
    for wrong in (16, torch.int64, torch.float8_e5m2, float, "int64", "", "torch."):
        with pytest.raises(ConfigError, match=r"precision is a piper\.Precision, a floating-point"):
            make_precision(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "policy", "names"),
    [
        (torch.bfloat16, "bf16", ["bfloat16", "torch.bfloat16", "BF16"]),
        (torch.half, "fp16", ["float16", "half", "torch.half", "torch.float16", "FP16"]),
        (torch.float, "float32", ["fp32", "float", "single", "torch.float32"]),
        (torch.double, "float64", ["fp64", "double", "torch.float64"]),
    ],
)
def test_a_type_has_many_names(dtype, policy, names):
    for name in (dtype, *names):
        assert make_precision(name) == make_precision(policy)
        fields = dict.fromkeys(("compute", "reduce", "master", "output"), name)
        found = piper.Precision(**fields)
        assert found == piper.Precision(**dict.fromkeys(fields, dtype))
        assert {found.compute, found.reduce, found.master, found.output} == {dtype}


def test_which_type_holds_which():
    order = [torch.float64, torch.float32]
    for short in (torch.float16, torch.bfloat16):
        assert all(holds(wide, short) for wide in order)
        assert not any(holds(short, wide) for wide in order)
    assert not holds(torch.float16, torch.bfloat16)
    assert not holds(torch.bfloat16, torch.float16)
    assert all(holds(t, t) for t in (*order, torch.float16, torch.bfloat16))


def test_cast_changes_floating_point_tensors_only():
    tree = {"x": X, "more": [X.to(torch.complex64), torch.arange(3), "word", 1.5, None]}
    found = cast(tree, torch.float16)
    assert found["x"].dtype == torch.float16
    assert [t.dtype for t in found["more"][:2]] == [torch.complex64, torch.int64]
    assert found["more"][2:] == ["word", 1.5, None]


SEEN: list[list[torch.dtype]] = []


class Seen(nn.Module):
    """Notes the types that its forward sees. Its buffer, a complex and a frozen parameter, a weight
    that is used twice.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.twist = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("table", torch.randn(3))

    def forward(self, x, index):
        tensors = (x, index, self.weight, self.twist, self.frozen, self.table)
        SEEN.append([t.dtype for t in tensors])
        y = x @ self.weight @ self.weight * self.frozen * self.table.to(x.dtype)
        return y, (y.float() * self.twist.abs()), index


def test_what_the_model_and_the_loss_see():
    model, seen = Seen(), []

    def loss(outputs, targets):
        y, z, index = outputs
        seen.append([y.dtype, z.dtype, index.dtype, targets.dtype])
        return ((y + z - targets) ** 2).mean()

    dag = piper.capture(model, loss, ((X, torch.arange(4)), Y), precision="bf16")
    short = torch.bfloat16
    expected = [short, torch.int64, short, torch.complex64, short, torch.float32]
    assert SEEN[-1] == expected
    assert seen[-1] == [torch.float32, torch.float32, torch.int64, torch.float32]
    assert {n: p.spec.dtype for n, p in dag.parameters.items()} == {
        "weight": DType.BFLOAT16,
        "twist": DType.COMPLEX64,
        "frozen": DType.BFLOAT16,
    }
    kept = {n: dag.master_dtype(n) for n in dag.parameters}
    assert kept == {
        "weight": DType.FLOAT32,
        "twist": DType.COMPLEX64,
        "frozen": DType.BFLOAT16,
    }
    made = {v.name: v.spec.dtype for v in dag.values.values() if v.role is Role.CONTRIBUTION}
    assert made == {"weight": DType.FLOAT32, "twist": DType.COMPLEX64}
    assert next(b for b in dag.buffers.values() if b.name == "table").spec.dtype is DType.FLOAT32
    assert model.weight.dtype == torch.float32


def test_each_use_of_a_weight_is_cast_before_they_are_added():
    def loss(outputs, targets):
        return ((outputs[0] - targets) ** 2).mean()

    dag = piper.capture(Seen(), loss, ((X, torch.arange(4)), Y), precision="bf16")
    (value,) = dag.contributions["weight"]
    chunk = dag.nodes[dag.producers[value]]
    body = dag.bodies[chunk.work.body]
    out = body.outputs[chunk.outputs.index(value)] - len(body.inputs)
    assert body.calls[out].target == "aten.add.Tensor"
    assert body.calls[out].results[0].dtype is DType.FLOAT32
    terms = [body.calls[arg.index - len(body.inputs)].target for arg in body.calls[out].args]
    assert terms == ["aten._to_copy.default"] * 2


def test_nothing_is_narrowed_silently():
    model = nn.Linear(3, 3).double()
    with pytest.raises(ConfigError, match=r"'weight' is torch.float64.*torch.float32.*model.to"):
        piper.capture(model, nn.functional.mse_loss, (X, Y), precision="bf16")
    wide = piper.Precision(master=torch.float64, reduce=torch.float64)
    dag = piper.capture(model, nn.functional.mse_loss, (X.double(), Y), precision=wide)
    assert dag.parameters["weight"].spec.dtype is DType.BFLOAT16
    assert dag.master_dtype("weight") is DType.FLOAT64


def test_every_named_policy_can_be_made():
    assert {type(make()) for make in PRECISIONS.values()} == {piper.Precision}


def test_statistics_that_torch_cannot_use_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match=r"batch norm '1'.*torch.float32.*torch.bfloat16"):
        piper.capture(model, nn.functional.mse_loss, (X, Y), precision="bf16")
    piper.capture(model, nn.functional.mse_loss, (X, Y), precision="float32")
    for name in ("running_mean", "running_var"):
        setattr(model[1], name, getattr(model[1], name).bfloat16())
    dag = piper.capture(model, nn.functional.mse_loss, (X, Y), precision="bf16")
    assert set(dag.buffer_updates) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
