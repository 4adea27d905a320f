"""What a mistake shows: the user's own frames and the message, not piper's insides."""

import inspect
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import piper
from piper import errors
from piper.boundary import public

F = torch.nn.functional
STRATEGY = piper.strategies.pipeline("1f1b", [[0], [1]], 2)
BATCH = (torch.randn(8, 4), torch.randn(8, 4))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.a(x)
        with piper.annotate("PP", 1):
            return self.last(h)

    def last(self, h: Tensor) -> Tensor:
        return self.b(h)


class Narrow(Two):
    def last(self, h: Tensor) -> Tensor:
        return self.b(h[:, :3])


class Nested(Two):
    def last(self, h: Tensor) -> Tensor:
        with piper.annotate("PP", 1):
            return self.b(h)


@pytest.fixture(autouse=True)
def _as_for_users() -> Iterator[None]:
    errors.show_internals(False)
    yield
    errors.show_internals()


def compiled(model: object, strategy: object = STRATEGY, **options: object) -> piper.Trainer:
    options = {"optimizer": sgd, "backend": "inprocess", **options}
    return piper.compile(model, F.mse_loss, strategy, BATCH, **options)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def shown(call: Callable[[], object], kind: type[BaseException] = piper.PiperError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


def functions(text: str) -> list[str]:
    """The names of the functions whose frames are shown."""
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


def mine(text: str) -> bool:
    """Whether every frame shown is this file's."""
    files = [line for line in text.splitlines() if line.startswith("  File ")]
    return bool(files) and all(f'"{__file__}"' in line for line in files)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: compiled(Two),
        lambda: compiled(Two(), STRATEGY[1:]),
        lambda: compiled(Two(), [piper.Place({"QQ": 0}, [0])]),
        lambda: compiled(Two(), memory_budget=10),
        lambda: compiled(Two(), precision="bf15"),
        lambda: piper.strategies.pipeline("1fb1", [[0], [1]], 2),
        lambda: piper.schedules.one_f_one_b(0, 2),
        lambda: piper.placements.chain([[0], [0]]),
        lambda: piper.plan(STRATEGY),
        lambda: piper.Precision(compute="float33"),
        lambda: piper.load_strategy("/nowhere/strategy.json"),
        lambda: piper.models.TransformerConfig(num_layers=0),
    ],
)
def test_a_mistake_shows_the_users_own_frames_alone(mistake):
    text = shown(mistake)
    assert mine(text), text


def test_frames_inside_the_model_are_kept_and_so_is_torchs_message():
    text = shown(lambda: compiled(Narrow()))
    assert mine(text), text
    assert functions(text).count("last") >= 1
    assert "h[:, :3]" in text
    assert "RuntimeError: " in text


def test_an_annotation_used_wrongly_is_shown_where_it_is():
    assert functions(shown(lambda: compiled(Nested())))[-2:] == ["forward", "last"]


def test_an_exception_of_a_data_function_is_the_users_own():
    def data(step: int) -> tuple[Tensor, Tensor]:
        return [BATCH][step + 1]

    with compiled(Two()) as trainer:
        text = shown(lambda: trainer.fit(data, 2), IndexError)
    assert mine(text), text
    assert functions(text)[-1] == "data"


def test_what_comes_back_from_a_worker_shows_the_users_own_frames():
    def data(step: int) -> tuple[Tensor, Tensor]:
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("lost")
        return BATCH

    def run() -> object:
        with compiled(Two()) as trainer:
            return trainer.fit(data, 2)

    text = shown(run, errors.RunError)
    assert "KeyError: 'lost'" in text
    assert mine(text), text
    assert functions(text).count("data") >= 1


def test_all_is_shown_to_who_asks_for_it():
    call = partial(compiled, Two(), STRATEGY[1:])
    short = shown(call)
    errors.show_internals()
    assert len(shown(call).splitlines()) > 2 * len(short.splitlines())


def test_what_the_user_was_handling_is_not_touched():
    def handle() -> None:
        try:
            nn.Linear(3, 3)(torch.ones(2, 2))
        except RuntimeError:
            piper.plan(STRATEGY)

    text = shown(handle)
    assert "torch/nn/modules/linear.py" in text
    assert "During handling" in text


def test_what_is_not_shown_is_still_there():
    @public
    def read() -> None:
        try:
            Path("/nowhere").read_text()
        except OSError as error:
            raise piper.PiperError(f"cannot read: {error}") from error

    with pytest.raises(piper.PiperError) as caught:
        read()
    assert isinstance(caught.value.__cause__ or caught.value.__context__, OSError)


def test_a_bug_shows_everything(monkeypatch):
    def broken(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a bug")

    broken.__code__ = broken.__code__.replace(
        co_filename=inspect.getfile(piper.compile.__wrapped__)
    )
    monkeypatch.setattr("piper.api.compile.make_clip", broken)
    text = shown(lambda: compiled(Two()), AssertionError)
    assert functions(text)[-3:] == ["_called", "compile", "broken"]


def test_what_is_public_keeps_its_name_signature_and_text():
    assert piper.compile.__name__ == "compile"
    assert "strategy" in inspect.signature(piper.compile).parameters
    assert inspect.getdoc(piper.Trainer.step).startswith("One training step")


def test_a_thread_shows_as_much():
    seen: list[str] = []

    def work() -> None:
        seen.append(shown(lambda: compiled(Two(), STRATEGY[1:])))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert mine(seen[0]), seen[0]


def test_every_public_function_shows_the_users_frames_alone():
    for name in piper.__all__:
        thing = getattr(piper, name)
        if inspect.isfunction(thing) and name != "annotate":
            assert hasattr(thing, "__wrapped__"), f"piper.{name} is not public"


def test_what_is_one_module_further_in_is_pointed_to():
    for name, where in [
        ("one_f_one_b", "it is piper.schedules.one_f_one_b"),
        ("chains", "did you mean piper.placements.chain?"),
        ("CaptureError", "it is piper.errors.CaptureError"),
        ("Transformer", "it is piper.models.Transformer"),
        ("pipeline", "it is piper.strategies.pipeline"),
    ]:
        with pytest.raises(AttributeError, match=re.escape(where)):
            getattr(piper, name)


def test_the_pointers_name_all_there_is():
    for module, names in piper._INSIDE.items():
        here = {*getattr(getattr(piper, module), "__all__", names)}
        if module == "schedules":  # which has the placements too
            here -= {*piper._INSIDE["placements"]}
        assert {*names} - {"huggingface"} == here


def test_models_are_there_without_torch_at_import():
    code = (
        "import sys, piper; assert 'torch' not in sys.modules; assert 'models' in dir(piper); "
        "print(piper.models.huggingface.annotate_experts.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "annotate_experts"
