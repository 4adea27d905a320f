from pathlib import Path

import pytest
import torch

from piper.api.strategies import pipeline
from piper.directives.strategy import dump_strategy
from piper.errors import ConfigError
from piper.training.config import load_config
from piper.training.sections import AdamWSection, SGDSection

STRATEGY = """
[strategy]
schedule = "1f1b"
groups = [[0, 1], [2, 3]]
num_microbatches = 4
"""


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def error(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_strategy_is_all_that_is_needed(write):
    config = load_config(write(STRATEGY))
    assert config.strategy.groups == ((0, 1), (2, 3))
    assert config.optimizer == AdamWSection()
    assert config.transformer().num_stages == 2
    assert config.transformer().context == config.train.seq_len
    assert config.batches().batch_size == config.train.batch_size


def test_every_section_is_read(write):
    config = load_config(
        write(
            STRATEGY
            + """
bucket_size = 0.5
[model]
kind = "transformer"
num_layers = 6
width = 96
tied_embedding = true
num_stages = 2
[data]
held_out = 0.2
[optimizer]
name = "sgd"
lr = 1
momentum = 0.9
[train]
steps = 7
seq_len = 32
backend = "inprocess"
max_minutes = 2.5
"""
        )
    )
    assert config.strategy.bucket_size == 0.5
    model = config.transformer()
    assert (model.num_layers, model.width, model.num_stages, model.context) == (6, 96, 2, 32)
    assert model.tied_embedding
    assert config.batches().held_out == 0.2
    assert config.optimizer == SGDSection(lr=1.0, momentum=0.9)
    assert (config.train.steps, config.train.backend, config.train.max_minutes) == (
        7,
        "inprocess",
        2.5,
    )


@pytest.mark.parametrize(
    ("section", "kind", "expected"),
    [
        (
            "betas = [0.8, 0.95]\nlr = 0.5\neps = 1e-6\nweight_decay = 0.1",
            torch.optim.AdamW,
            {"betas": (0.8, 0.95), "lr": 0.5, "eps": 1e-6, "weight_decay": 0.1},
        ),
        (
            'name = "adam"\nbetas = [0.8, 0.95]\nlr = 0.5\neps = 1e-6\nweight_decay = 0.1',
            torch.optim.Adam,
            {"betas": (0.8, 0.95), "lr": 0.5, "eps": 1e-6, "weight_decay": 0.1},
        ),
        (
            'name = "sgd"\nlr = 0.5\nmomentum = 0.9\nnesterov = true\nweight_decay = 0.1',
            torch.optim.SGD,
            {"lr": 0.5, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
    ],
)
def test_every_option_reaches_the_optimizer(write, section, kind, expected):
    config = load_config(write(f"{STRATEGY}\n[optimizer]\n{section}"))
    optimizer = config.optimizer.build([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trian]", "trian: unknown field (did you mean 'train'?)"),
        ("[train]\nstesp = 3", "train.stesp: unknown field (did you mean 'steps'?)"),
        ("[model]\nlayers = 3", "model.layers: unknown field (did you mean 'num_layers'?)"),
        ("[optimizer]\nlearning_rate = 1", "optimizer.learning_rate: unknown field"),
        (
            '[optimizer]\nname = "sgd"\nbetas = [0.9, 0.9]',
            "optimizer.betas: unknown field; known here: name, lr, momentum, nesterov, weight_decay",
        ),
        ("[train]\nmax_grad_norm = 0", "train.max_grad_norm: expected a number > 0"),
        ("[train]\nsteps = 0", "train.steps: expected an integer >= 1, found 0"),
        ('[train]\nsteps = "9"', "train.steps: expected an integer, found '9'"),
        ("[train]\nsteps = 1.5", "train.steps: expected an integer, found 1.5"),
        ("[train]\nsteps = true", "train.steps: expected an integer, found true"),
        (
            '[train]\nbackend = "slurm"',
            "train.backend: expected one of 'inprocess', 'ray', found 'slurm'",
        ),
        (
            '[optimizer]\nname = "adamv"',
            "optimizer.name: expected one of 'adamw', 'adam', 'sgd', found 'adamv'",
        ),
        ('[model]\nkind = "rnn"', "model.kind: expected one of 'transformer', found 'rnn'"),
        (
            "[optimizer]\nbetas = [0.9]",
            "optimizer.betas: expected an array of length 2, found an array of 1: [0.9]",
        ),
        ("[optimizer]\nlr = nan", "optimizer.lr: expected a finite number, found nan"),
        ("[optimizer]\nlr = inf", "optimizer.lr: expected a finite number, found inf"),
        (
            "[model]\nwidth = 250",
            "[model]: TransformerConfig.width: expected a multiple of num_heads=4, found 250",
        ),
        ("train = 3", "train: expected a section, found 3"),
        (
            '[optimizer]\nname = "sgd"\nnesterov = true',
            "optimizer.nesterov: expected a momentum above 0 with it, found momentum 0",
        ),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected_and_found(write, text, message):
    # A key of the top level must stand before the first section.
    parts = [text, STRATEGY] if text.startswith("train =") else [STRATEGY, text]
    assert error(write("\n".join(parts))).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "strategy: expected this section, found none"),
        ("[strategy]", "[strategy]: expected either schedule or file, found neither"),
        (STRATEGY + 'file = "s.json"', "[strategy]: expected either schedule or file, found both"),
        (STRATEGY + "zero = 4", "strategy.zero: expected an integer <= 3, found 4"),
        (
            '[strategy]\nfile = "s.json"\nbucket_size = 1',
            "strategy.bucket_size: a strategy file already says this",
        ),
        (
            '[strategy]\nschedule = "1f1b"',
            "strategy.groups: expected a value with schedule, found none",
        ),
        (
            '[strategy]\nschedule = "1f1b"\ngroups = [[0]]',
            "strategy.num_microbatches: expected a value with schedule, found none",
        ),
        (
            STRATEGY.replace("[2, 3]", "[2, 0]"),
            "strategy.groups: expected each device once, found 0 more than once",
        ),
        (
            STRATEGY.replace("[2, 3]", "[]"),
            "strategy.groups: expected at least one device in each group",
        ),
        (
            STRATEGY.replace("[2, 3]", '[2, "a"]'),
            "strategy.groups[1][1]: expected an integer, found 'a'",
        ),
        (
            STRATEGY.replace('"1f1b"', '"1f1f"'),
            "[strategy]: unknown schedule '1f1f' (did you mean '1f1b'?)",
        ),
        (STRATEGY.replace("[2, 3]", "[2]"), "[strategy]: "),
        (
            STRATEGY + "num_virtual_stages = 2",
            "[strategy]: schedule '1f1b' has one stage per group",
        ),
        ('[strategy]\nfile = "gone.json"', "[strategy]: cannot read strategy file"),
    ],
)
def test_a_strategy_is_a_schedule_or_a_file(write, text, message):
    assert error(write(text)).startswith(message)


def test_a_schedule_becomes_the_directives_of_a_pipeline(write):
    config = load_config(write(STRATEGY + "bucket_size = 0.5"))
    expected = pipeline("1f1b", [[0, 1], [2, 3]], 4, bucket_size=0.5)
    assert config.strategy.directives() == expected


def test_zero_reaches_the_strategy(write):
    config = load_config(write(STRATEGY + "zero = 2"))
    expected = pipeline("1f1b", [[0, 1], [2, 3]], 4, zero=2)
    assert config.strategy.directives() == expected


@pytest.mark.parametrize(
    ("schedule", "stages"), [("zb_h1", 2), ("zbv", 4), ("dualpipev", 4), ("dualpipe", 2)]
)
def test_a_schedule_knows_the_models_stages(write, schedule, stages):
    config = load_config(write(STRATEGY.replace("1f1b", schedule)))
    assert config.transformer().num_stages == stages
    assert config.strategy.directives() == pipeline(schedule, [[0, 1], [2, 3]], 4)


@pytest.mark.parametrize(("text", "value"), [("true", True), ('"fallback"', "fallback")])
def test_compile(write, text, value):
    assert not load_config(write(STRATEGY)).train.compile
    assert load_config(write(STRATEGY + f"[train]\ncompile = {text}")).train.compile == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"always"', "train.compile: expected one of true, false, 'fallback', found 'always'"),
        ("3", "train.compile: expected true, false or a string, found 3"),
    ],
)
def test_another_value_of_compile(write, text, message):
    assert error(write(STRATEGY + f"[train]\ncompile = {text}")) == message


def test_stages_of_the_model_that_the_groups_do_not_hold(write):
    message = error(write(STRATEGY + "[model]\nnum_stages = 4"))
    assert message.startswith("model.num_stages: expected 2, 1 for each of the 2 groups")
    assert message.endswith("found 4; leave it out, or change the groups")


def test_more_stages_than_layers(write):
    message = error(write(STRATEGY + "[model]\nnum_layers = 1"))
    assert message.startswith("[model]: 2 stages cannot share 1 layers")


def test_virtual_stages_multiply_the_models_stages(write):
    text = STRATEGY.replace("1f1b", "interleaved_1f1b") + "num_virtual_stages = 2"
    config = load_config(write(text))
    assert config.transformer().num_stages == 4
    expected = pipeline("interleaved_1f1b", [[0, 1], [2, 3]], 4, num_virtual_stages=2)
    assert config.strategy.directives() == expected


def test_a_strategy_file_is_read_from_beside_the_configuration(write):
    strategy = pipeline("gpipe", [[0], [1]], 2)
    path = write('[strategy]\nfile = "sub/s.json"\n[data]\nfiles = ["*.txt", "/abs/a.txt"]')
    (path.parent / "sub").mkdir()
    dump_strategy(strategy, path.parent / "sub" / "s.json")
    config = load_config(path)
    assert config.strategy.directives() == strategy
    assert config.data.files == (str(path.parent / "*.txt"), "/abs/a.txt")


def test_a_missing_file_is_named(tmp_path):
    assert "No such file" in error(tmp_path / "gone.toml")


def test_a_syntax_error_says_where(write):
    assert "line 2" in error(write("[train]\nsteps = = 3\n"))


def test_the_examples_load():
    folder = Path(__file__).parents[2] / "examples"
    paths = sorted(folder.glob("*.toml"))
    assert folder / "gpt_stdlib.toml" in paths
    for path in paths:
        load_config(path)


def test_the_learning_rate_warms_up(write):
    schedule = load_config(write(STRATEGY + "[train]\nwarmup_steps = 4")).train.warmup()
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert load_config(write(STRATEGY)).train.warmup() is None


def test_an_address_is_rays(write):
    address = '[train]\naddress = "auto"\n'
    assert load_config(write(STRATEGY + address)).train.address == "auto"
    message = error(write(STRATEGY + address + 'backend = "inprocess"'))
    assert message.startswith("train.address: only backend")


def test_memory_is_bytes_or_texts(write):
    limits = load_config(
        write(STRATEGY + '[memory]\nbudget = "1.5GiB"\nreceive_bytes = 0\nfetch_bytes = "2MB"')
    ).memory.limits()
    assert limits.budget == 3 * 2**29
    assert (limits.bounds.receive, limits.bounds.gather, limits.bounds.fetch) == (
        0,
        None,
        2_000_000,
    )
    assert load_config(write(STRATEGY)).memory.limits().budget is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('budget = "much"', "[memory]: memory_budget: expected bytes"),
        ("fetch_bytes = -1", "memory.fetch_bytes: "),
        ("budget = 1.5", "memory.budget: expected bytes, or a text"),
        ("buget = 1", "memory.buget: unknown field (did you mean 'budget'?)"),
    ],
)
def test_malformed_memory(write, line, expected):
    assert error(write(f"{STRATEGY}[memory]\n{line}")).startswith(expected)
