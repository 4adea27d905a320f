"""A case as the text of a Python module: what is run, and what a failure leaves behind."""

from pathlib import Path

from tests.random.cases import Case, Layer, Sketch, to_json
from tests.random.layouts import directives

HERE = Path(__file__).parent

HEADER = '''"""{title}

Needs piper and PyTorch; run it: it trains under the strategy and plainly, and compares.
{json}
"""

import torch
from torch import nn
from torch.nn import functional

import piper

'''

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(params, lr=0.05)",
    "momentum": "torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)",
    "nesterov": "torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)",
    "adam": "torch.optim.Adam(params, lr=0.01, eps=1e-3)",
    "adamw": "torch.optim.AdamW(params, lr=0.01, eps=1e-3)",
    "rmsprop": "torch.optim.RMSprop(params, lr=0.01, eps=1e-2, momentum=0.5)",
    "adagrad": "torch.optim.Adagrad(params, lr=0.02, eps=1e-2)",
    "nadam": "torch.optim.NAdam(params, lr=0.01, eps=1e-3)",
    "radam": "torch.optim.RAdam(params, lr=0.01, eps=1e-3)",
    "adamax": "torch.optim.Adamax(params, lr=0.01, eps=1e-2)",
}

COMPUTE = {
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "float32": "torch.float32",
    "float64": "torch.float64",
}


def definitions(case: Case) -> str:
    """Model, loss, batches, strategies, options."""
    sketch = case.sketch
    return "\n".join(
        [
            *_model(sketch),
            "",
            "",
            *_loss(sketch),
            "",
            "",
            *_batch(case),
            "",
            "",
            *_setup(case),
            "",
        ]
    )


def script(case: Case, title: str) -> str:
    """The whole of a script that shows what *case* does."""
    parts = [HEADER.format(title=title, json=to_json(case)), definitions(case)]
    for name in ("reference.py", "trial.py"):
        text = (HERE / name).read_text()
        kept = [line for line in text.splitlines() if not line.startswith("from tests.")]
        parts.append(f"\n\n# --- {name} " + "-" * 60 + "\n\n" + "\n".join(kept) + "\n")
    parts.append('\n\nif __name__ == "__main__":\n    main(globals())\n')
    return "".join(parts)


# --- the model -------------------------------------------------------------------------------------


def _model(sketch: Sketch) -> list[str]:
    width, last = sketch.width, len(sketch.layers)
    arguments = ["x", *(["ids"] if sketch.ids else [])]
    arguments += ["flag=True"] if sketch.has("optional") else []
    lines = ["class Model(nn.Module):"]
    lines += ["    grouped = staticmethod(piper.grouped_mm)", "", "    def __init__(self):"]
    lines += ["        super().__init__()"]
    if sketch.ids:
        lines += [f"        self.embed = nn.Embedding(5, {width})"]
    for i, layer in enumerate(sketch.layers):
        lines += [f"        {line}" for line in _made(i, layer, width)]
    lines += ["        self.double()"]
    for i, layer in enumerate(sketch.layers):
        if layer.kind == "float32":
            lines += [f"        self.l{i}.float()"]
    lines += ["", f"    def forward(self, {', '.join(arguments)}):"]
    for i, layer in enumerate(sketch.layers):
        indent = 8
        for tag, index in (("PP", layer.region), ("IN", layer.inner)):
            if index is not None:
                lines += [" " * indent + f'with piper.annotate("{tag}", {index}):']
                indent += 4
        body = []
        if sketch.ids and i == 0:
            body += ["x = x + self.embed(ids)"]
        read = [f"v{r}" if r else "x" for r in layer.reads]
        body += [f"h = {(' * ' if layer.multiply else ' + ').join(read)}"]
        body += [*_run(i, layer, width), f"v{i + 1} = h"]
        lines += [" " * indent + line for line in body]
    results = [f"v{last}", *(f"v{e}" for e in sketch.extra)]
    lines += [f"        return {', '.join(results)}"]
    return lines


def _made(i: int, layer: Layer, width: int) -> list[str]:
    kind, variant, name = layer.kind, layer.variant, f"self.l{i}"
    bias = ", bias=False" if variant % 3 == 0 else ""
    norms = (f"LayerNorm({width})", f"RMSNorm({width})", f"GroupNorm(2, {width})")
    experts = [
        f"self.r{i} = nn.Linear({width}, 4, bias=False)",
        f"self.up{i} = nn.Parameter(torch.randn(4, {width}, 3) / 2)",
        f"self.down{i} = nn.Parameter(torch.randn(4, 3, {width}) / 2)",
    ]
    return {
        "linear": [f"{name} = nn.Linear({width}, {width}{bias})"],
        "tied": [
            f"{name} = nn.Linear({width}, {width})",
            f"{name}.weight = self.l{layer.of}.weight",
        ],
        "frozen": [f"{name} = nn.Linear({width}, {width}).requires_grad_(False)"],
        "norm": [f"{name} = nn.{norms[variant % 3]}"],
        "batch_norm": [f"{name} = nn.BatchNorm1d({width})"],
        "chunks": [f"{name} = nn.Linear({width}, {2 * width})"],
        "dropout": [f"{name} = nn.Dropout({0.2 + 0.1 * (variant % 3):.1f})"],
        "table": [
            f'self.register_buffer("t{i}", torch.rand({width}), persistent={variant % 2 == 0})'
        ],
        "bias": [f"self.b{i} = nn.Parameter(torch.rand({width}))"],
        "scalar": [f"self.b{i} = nn.Parameter(torch.rand(()) + 0.5)"],
        "counter": [
            f'self.register_buffer("n{i}", torch.zeros({width}))'
            if variant != 1
            else f'self.register_buffer("n{i}", torch.zeros((), dtype=torch.int64))'
        ],
        "lookup": [f"{name} = nn.Embedding({width + 1}, {width})"],
        "attention": [f"{name} = nn.Linear(2, 6{bias})"],
        "float32": [f"{name} = nn.Linear({width}, {width})"],
        "optional": [f"{name} = nn.Linear({width}, {width})"],
        "convolution": [f"{name} = nn.Conv1d(1, 1, 3, padding=1)"],
        "capacity": experts,
        "dropless": experts,
    }.get(kind, [])


def _run(i: int, layer: Layer, width: int) -> list[str]:
    kind, variant, name = layer.kind, layer.variant, f"self.l{i}"
    half = width // 2
    views = (
        "h = h[:, :]",
        "h = h.t().contiguous().t()",
        "h = h.flip(1)",
        f"h = h.unflatten(1, (2, {half})).transpose(1, 2).flatten(1)",
        f"h = torch.cat([h[:, {half}:], h[:, :{half}]], dim=1)",
        "h = h.view_as(h)",
    )
    places = (
        ["h = (h * 1.5).relu_()"],
        ["h = h.clone()", "h[:, 0] = 0.5"],
        ["h = (h + 1.0).mul_(0.5)"],
    )
    writes = (
        f"self.n{i}.add_(h.detach().sum(0))",
        f"self.n{i} += 1",
        f"self.n{i}.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)",
        f"self.n{i}.copy_(h.detach()[0])",
        f"self.n{i}[0] = h.detach().sum()",
        f"self.n{i} = self.n{i} * 0.5 + h.detach().mean(0)",
    )
    reads = f"h = h + 0.1 * self.n{i}" if variant in (0, 2, 5) else "h = h * 0.9"
    top = 1 + variant % 2
    return {
        "linear": [f"h = {name}(h).tanh()"],
        "tied": [f"h = {name}(h).tanh()"],
        "reused": [f"h = self.l{layer.of}(h).sin()"],
        "detached_use": [
            f"h = h + functional.linear(h, self.l{layer.of}.weight.detach()).cos() / 2"
        ],
        "frozen": [f"h = {name}(h).tanh()"],
        "norm": [f"h = {name}(h)"],
        "batch_norm": [f"h = {name}(h)"],
        "chunks": [f"a, b = {name}(h).chunk(2, dim=-1)", "h = a.sigmoid() * b"],
        "views": [views[variant % 6]],
        "dropout": [f"h = {name}(h)"],
        "noise": [f"h = h + 0.1 * torch.{('rand', 'randn')[variant % 2]}_like(h) * self.training"],
        "in_place": places[variant % 3],
        "table": [f"h = h * self.t{i}"],
        "detached": ["h = h + h.detach().sin() * (h > 0)"],
        "bias": [f"h = h + self.b{i}"],
        "scalar": [f"h = h * self.b{i}"],
        "counter": [reads, "if self.training:", f"    {writes[variant]}"],
        "lookup": [f"h = h + {name}((h.detach() > 0).long().sum(-1))"],
        "attention": [
            f"q, k, v = {name}(h.reshape(-1, {half}, 2)).chunk(3, dim=-1)",
            "h = h + functional.scaled_dot_product_attention(q, k, v).flatten(1)",
        ],
        "float32": [f"h = {name}(h.float()).tanh().double()"],
        "optional": ["if flag:", f"    h = h + {name}(h).tanh()"],
        "convolution": [f"h = h + {name}(h.unsqueeze(1)).squeeze(1).tanh()"],
        "capacity": [
            f"rates = self.r{i}(h).softmax(-1)",
            "rows = rates.t().unsqueeze(-1) * h",
            f'with piper.annotate("EP", {i}):',
            f"    rows = torch.bmm(torch.bmm(rows, self.up{i}).tanh(), self.down{i})",
            "h = h + (rows * rates.t().unsqueeze(-1)).sum(0)",
        ],
        "dropless": [
            f"rates, chosen = self.r{i}(h).softmax(-1).topk({top}, dim=-1)",
            "order = chosen.flatten().argsort(stable=True)",
            "counts = (chosen.flatten()[:, None] == torch.arange(4)).sum(0)",
            f"rows = h[order // {top}]",
            f'with piper.annotate("EP", {i}):',
            f"    rows = self.grouped(self.grouped(rows, self.up{i}, counts).tanh(), self.down{i}, counts)",
            f"rows = rows[order.argsort()].view(-1, {top}, {width})",
            "h = h + (rows * rates.unsqueeze(-1)).sum(1)",
        ],
    }[kind]


# --- loss, batch, strategies -----------------------------------------------------------------------


def _loss(sketch: Sketch) -> list[str]:
    lines = ["def loss_fn(outputs, targets):"]
    last = "outputs[0]" if sketch.extra else "outputs"
    if sketch.loss == "classes":
        lines += [f'    error = functional.cross_entropy({last}, targets, reduction="none")']
    else:
        lines += [f"    error = ({last} - targets).square().sum(-1)"]
    lines += [
        f"    error = error + 0.1 * outputs[{i + 1}].sin().sum(-1)"
        for i in range(len(sketch.extra))
    ]
    weights = {
        "tokens": "(targets[:, 0] > -0.5)",
        "mask": "targets[:, 0].abs()",
        "constant": "torch.ones_like(error)",
    }
    if sketch.loss in weights:
        lines += [f"    weight = {weights[sketch.loss]}"]
        return [*lines, "    return (error * weight).sum(), weight.sum()"]
    return [*lines, "    return error.mean()"]


def _batch(case: Case) -> list[str]:
    sketch = case.sketch
    width, rows = sketch.width, case.parts * case.rows
    lines = [f"ROWS = {rows}", "", "", "def batch(number, rows=ROWS):"]
    lines += ["    generator = torch.Generator().manual_seed(number)"]
    options = "generator=generator"
    lines += [f"    x = torch.randn(rows, {width}, {options}, dtype=torch.float64)"]
    if sketch.loss == "classes":
        lines += [f"    targets = torch.randint({width}, (rows,), {options})"]
    else:
        lines += [f"    targets = torch.randn(rows, {width}, {options}, dtype=torch.float64)"]
        lines += ["    targets[0, 0] = 1.0"]
    names = ["x"]
    if sketch.ids:
        lines += [f"    ids = torch.randint(5, (rows,), {options})"]
        names += ["ids"]
    if sketch.has("optional"):
        lines += ["    flag = number % 2 == 0"]
        names += ["flag"]
    inputs = f"({', '.join(names)})" if len(names) > 1 else "x"
    if case.named:
        inputs = "{" + ", ".join(f'"{n}": {n}' for n in names) + "}"
    return [*lines, f"    return {inputs}, targets"]


def _setup(case: Case) -> list[str]:
    lines = ["LAYOUTS = ["]
    for layout in case.layouts:
        lines += ["    ("]
        lines += ["        ["]
        lines += [f"            piper.{d!r}," for d in directives(layout, case.sketch)]
        lines += ["        ],"]
        lines += [f"        {layout.replicas},  # replicas"]
        lines += [f"        {layout.microbatches},  # microbatches of each"]
        lines += [f'        "{layout.buffers}",  # what becomes of buffers that replicas write']
        lines += ["    ),"]
    lines += ["]"]
    lines += [f"ACTIONS = {list(case.actions)!r}"]
    lines += [f"SEED = {case.seed}", "", ""]
    lines += ["def optimizer(params):", f"    return {OPTIMIZERS[case.optimizer]}", "", ""]
    lines += ["def rate(step):", "    return 1.0 / (1 + step)", "", ""]
    norm = 'float("inf")' if case.infinite_norm else "2.0"
    entries = {"seed": "SEED", "optimizer": "optimizer"}
    if case.groups:
        entries["param_groups"] = '[{"names": ["l0.*"], "lr": 0.01, "weight_decay": 0.1}]'
    if case.schedule:
        entries["lr_schedule"] = "rate"
    if case.max_norm is not None:
        entries |= {"max_grad_norm": repr(case.max_norm), "norm_type": norm}
    if case.precision is not None:
        scale = f", loss_scale=piper.LossScale(init={case.scale}, growth_interval=2)"
        entries["precision"] = (
            f"piper.Precision(compute={COMPUTE[case.precision]}, reduce=torch.float64, master=torch.float64, "
            f"output=torch.float64{scale if case.scale is not None else ''})"
        )
    entries |= {name: repr(count) for name, count in case.bounds}
    if case.compiled:
        entries["compile"] = "True"
    lines += ["COMPILE = {", *(f'    "{k}": {v},' for k, v in entries.items()), "}"]
    lines += [f'BACKEND = "{"ray" if case.ray else "inprocess"}"', f"DELAY = {case.delay}"]
    lines += [f"TOLERANCE = {tolerance(case)}"]
    return lines


def tolerance(case: Case) -> float:
    """How far apart two orders of the same sums may be."""
    if case.sketch.has("float32"):
        return 1e-4
    return 1e-8
