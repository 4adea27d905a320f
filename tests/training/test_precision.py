"""``train.precision``: a name or a section of its own."""

import pytest
import torch

import piper
from piper.errors import ConfigError
from piper.training.config import load_config

STRATEGY = """
[strategy]
schedule = "1f1b"
groups = [[0, 1], [2, 3]]
num_microbatches = 4
"""


@pytest.fixture
def policy(tmp_path):
    """The policy of a configuration with this text, or the text of the error without the path."""

    def read(text):
        path = tmp_path / "run.toml"
        path.write_text(f"{STRATEGY}\n{text}")
        try:
            return load_config(path).train.policy()
        except ConfigError as error:
            return str(error).removeprefix(f"{path}: ")

    return read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ('[train]\nprecision = "bf16"', piper.Precision()),
        ('[train]\nprecision = "torch.bfloat16"', piper.Precision()),
        ("[train.precision]", piper.Precision()),
        ('[train.precision]\ncompute = "bf16"\noutput = "fp32"', piper.Precision()),
        (
            """
            [train.precision]
            compute = "float16"
            reduce = "float64"
            master = "float64"
            output = "float16"
            loss_scale = { init = 8, backoff = 0.25 }
            """,
            piper.Precision(
                compute=torch.float16,
                reduce=torch.float64,
                master=torch.float64,
                output=torch.float16,
                loss_scale=piper.LossScale(init=8.0, backoff=0.25),
            ),
        ),
    ],
)
def test_what_is_read(policy, text, expected):
    assert policy(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[train]\nprecision = "bf61"',
            "train.precision: precision is a piper.Precision, a floating-point type",
        ),
        ("[train]\nprecision = 16", "train.precision: expected "),
        (
            '[train.precision]\ncompute = "int8"',
            "train.precision: compute: expected a floating-point type of torch",
        ),
        (
            '[train.precision]\ncomput = "float16"',
            "train.precision.comput: unknown field (did you mean 'compute'?)",
        ),
        (
            '[train.precision]\ncompute = "float64"',
            "train.precision: Precision: master (torch.float32) does not hold",
        ),
        (
            "[train.precision.loss_scale]\ngrowth = 1",
            "train.precision.loss_scale.growth: expected a number > 1",
        ),
        (
            "[train.precision.loss_scale]\ngroth = 2",
            "train.precision.loss_scale.groth: unknown field (did you mean 'growth'?)",
        ),
    ],
)
def test_what_is_wrong_is_named(policy, text, message):
    assert policy(text).startswith(message)


def test_a_run_goes_on_under_another_name_of_its_type(tmp_path):
    """What a checkpoint says of the run is the same for all names of a type."""

    def described(text):
        path = tmp_path / "run.toml"
        path.write_text(f"{STRATEGY}\n{text}")
        return load_config(path).train.precision_as_data()

    assert described('[train]\nprecision = "torch.bfloat16"') == "bf16"
    assert described('[train]\nprecision = "half"') == "fp16"
    assert described("") is None
    section = '[train.precision]\ncompute = "{}"'
    assert described(section.format("half")) == described(section.format("float16"))
    assert described(section.format("half")) != described(section.format("bf16"))
