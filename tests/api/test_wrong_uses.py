"""Wrong arguments are answered with an error of piper that says what was expected and found."""

import math

import pytest
import torch

import piper
from piper.errors import (
    AnnotationError,
    BatchError,
    CaptureError,
    ConfigError,
    DirectiveError,
    PlacementError,
    PlanError,
    ScheduleError,
    StateError,
    StrategyFileError,
)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        with piper.annotate("PP"):
            x = self.first(x).relu()
        with piper.annotate("PP"):
            return self.second(x)


LOSS = torch.nn.functional.cross_entropy
BATCH = torch.arange(32.0).reshape(8, 4), torch.arange(8) % 3
PLACES = [piper.Place({"PP": 0}, [0]), piper.Place({"PP": 1}, [1])]
STRATEGY = [*PLACES, piper.Split({}, num_microbatches=2), *piper.schedules.one_f_one_b(2, 2)]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def compiled(**given):
    setup = {
        "model": Model(),
        "loss_fn": LOSS,
        "strategy": STRATEGY,
        "example_batch": BATCH,
        "optimizer": sgd,
        "backend": "inprocess",
    }
    return piper.compile(**{**setup, **given})


DIRECTIVES = {
    "devices, a number": (lambda: piper.Place({}, devices=0), r"devices: expected a list.*=0"),
    "devices, texts": (lambda: piper.Place({}, ["0"]), r"devices\[0\]: expected an integer"),
    "devices, a typo": (
        lambda: piper.Replicate({}, devices="plced"),
        r"found devices='plced'; write for instance devices=\[0, 1\] or 'placed'",
    ),
    "filter, nothing": (lambda: piper.Place(None, [0]), "filter: expected a mapping of tags"),
    "filter, a text": (lambda: piper.Place("PP", [0]), "filter: expected a mapping of tags"),
    "filter, a fraction": (lambda: piper.Place({"PP": 0.5}, [0]), "filter.*expected an integer or"),
    "filter, a tensor": (lambda: piper.Place({"PP": torch.ones(1)}, [0]), "expected plain data"),
    "microbatches, a text": (
        lambda: piper.Split({}, num_microbatches="4"),
        "num_microbatches: expected an integer, found num_microbatches='4'",
    ),
    "a number as a switch": (
        lambda: piper.Replicate({}, shard_grads=2),
        "shard_grads: expected True or False",
    ),
    "filters without groups": (
        lambda: piper.Order([{"PP": 0}, {"PP": 1}]),
        r"filters\[0\]: expected a list",
    ),
    "a text as a list": (lambda: piper.Recompute({}, save="mm"), "save: expected a list"),
    "one directive": (lambda: compiled(strategy=PLACES[0]), "a strategy is a list.*found Place"),
    "a path": (lambda: compiled(strategy="s.json"), "found str: 's.json'; piper.load_strategy"),
    "no strategy": (lambda: compiled(strategy=None), "a strategy is a list.*found NoneType"),
    "names": (lambda: compiled(strategy=["1f1b"]), "entry 0 of the strategy.*found str: '1f1b'"),
    "a list inside": (
        lambda: compiled(strategy=[*PLACES, piper.schedules.gpipe(2, 2)]),
        r"entry 2 of the strategy.*found list.*unpack it with \*",
    ),
    "texts dumped": (lambda: piper.dump_strategy(["1f1b"], "s.json"), "entry 0 of the strategy"),
}


@pytest.mark.parametrize("wrong", DIRECTIVES)
def test_directives_and_strategies(wrong):
    make, message = DIRECTIVES[wrong]
    with pytest.raises(DirectiveError, match=message):
        make()


def test_tuples_ranges_and_enumerated_passes_are_as_good_as_lists_and_texts(tmp_path):
    from piper.ir.dag import Pass

    assert piper.Place({"PP": (0, 1)}, devices=range(2)) == piper.Place({"PP": [0, 1]}, [0, 1])
    order = piper.Order([[{"PASS": Pass.FORWARD}]])
    assert order == piper.Order([[{"PASS": "F"}]])
    piper.dump_strategy([order], tmp_path / "s.json")
    assert piper.load_strategy(tmp_path / "s.json") == [order]


def test_a_strategy_may_come_from_a_generator():
    dag = piper.apply(piper.capture(Model(), LOSS, BATCH), (d for d in STRATEGY))
    assert piper.plan(dag).num_devices == 2


ARGUMENTS = {
    "model, a class": ({"model": Model}, ConfigError, "found the class Model; give an instance"),
    "model, a function": ({"model": len}, ConfigError, "model: expected a Module, found builtin"),
    "loss, a name": ({"loss_fn": "mse"}, ConfigError, "loss_fn is called.*found str: 'mse'"),
    "optimizer, made": (
        {"optimizer": sgd(Model().parameters())},
        ConfigError,
        "optimizer= is a function that makes an optimizer.*found SGD",
    ),
    "optimizer, a name": ({"optimizer": "adam"}, ConfigError, "found str: 'adam'"),
    "optimizer, its option": (
        {"optimizer": lambda p: torch.optim.AdamW(p, weight_decy=0.1)},
        ConfigError,
        "optimizer= failed over .*weight_decy",
    ),
    "optimizer, on one device": (
        {"optimizer": lambda p: torch.optim.AdamW(p, weight_decy=0.1), "strategy": []},
        ConfigError,
        "optimizer= failed over .*weight_decy",
    ),
    "schedule, a number": ({"lr_schedule": 0.1}, ConfigError, "lr_schedule= is a function"),
    "schedule, fails": ({"lr_schedule": lambda s: 1 / s}, ConfigError, "failed for step 0"),
    "schedule, nothing": ({"lr_schedule": lambda s: None}, ConfigError, "failed for step 0"),
    "schedule, no number": ({"lr_schedule": lambda s: math.nan}, ConfigError, "found NaN"),
    "groups, a mapping": ({"param_groups": {"names": ["*"]}}, ConfigError, "found 'names'"),
    "groups, an option": (
        {"param_groups": [{"names": ["*.bias"], "weight_decy": 0.0}]},
        ConfigError,
        r"param_groups\[0\]: SGD has no option 'weight_decy' \(did you mean 'weight_decay'\?\)",
    ),
    "norm, a text": ({"max_grad_norm": "1"}, ConfigError, "max_grad_norm is positive.*'1'"),
    "seed, a fraction": ({"seed": 1.5}, ConfigError, "seed is an integer, found 1.5"),
    "backend, nothing": ({"backend": None}, ConfigError, "a backend is 'inprocess' or 'ray'"),
    "dims, a list": ({"batch_dims": ["x"]}, CaptureError, "batch_dims maps names"),
    "batch, no rows": (
        {"example_batch": (BATCH[0][:0], BATCH[1][:0])},
        CaptureError,
        "'inputs' has no rows",
    ),
}


@pytest.mark.parametrize("wrong", ARGUMENTS)
def test_arguments_of_compile(wrong):
    given, error, message = ARGUMENTS[wrong]
    with pytest.raises(error, match=message):
        compiled(**given)


def failing_later(step):
    if step < 2:
        return BATCH
    raise ValueError("no such file")


CALLS = {
    "data, a number": (lambda t: t.fit(5, 5), BatchError, "data is a function.*found int"),
    "data, nothing": (lambda t: t.fit(lambda s: None, 2), BatchError, "pair.*found NoneType"),
    "steps, a fraction": (lambda t: t.fit([BATCH], 1.5), BatchError, "steps is an integer"),
    "evaluation, no rows": (
        lambda t: t.evaluate(BATCH[0][:0], BATCH[1][:0]),
        BatchError,
        "no rows",
    ),
    "state, nothing": (lambda t: t.load_state_dict(None), StateError, "expected a mapping"),
    "state, a number": (
        lambda t: t.load_state_dict(dict.fromkeys(t.state_dict(), 1)),
        StateError,
        "expected a tensor, found int",
    ),
    "state, a typo": (
        lambda t: t.load_state_dict({"frist.bias": torch.ones(8)}),
        StateError,
        r"unexpected entry 'frist.bias' \(did you mean 'first.bias'\?\); the model has 4 entries",
    ),
    "another model": (
        lambda t: t.copy_to(torch.nn.Linear(2, 2)),
        StateError,
        "copy_to needs a model with the parameters",
    ),
    "data that fails": (  # last: a failure on a worker closes the trainer
        lambda t: t.fit(failing_later, 4),
        piper.errors.RunError,
        r"(?s)batch of step 2 could not be loaded: ValueError: no such file.*in failing_later",
    ),
}


@pytest.fixture(scope="module")
def trainer():
    with compiled() as trainer:
        yield trainer


@pytest.mark.parametrize("wrong", CALLS)
def test_calls_of_a_trainer(trainer, wrong):
    call, error, message = CALLS[wrong]
    with pytest.raises(error, match=message):
        call(trainer)


def test_a_trainer_without_an_optimizer_says_so_and_goes_on():
    with compiled(optimizer=None) as trainer:
        for call in (lambda: trainer.step(*BATCH), lambda: trainer.fit([BATCH], 1)):
            with pytest.raises(StateError, match="compiled with optimizer=None"):
                call()
        assert trainer.step(*BATCH, update=False).loss == pytest.approx(
            trainer.evaluate(*BATCH).loss
        )


@pytest.fixture(scope="module")
def dag():
    return piper.capture(Model(), LOSS, BATCH)


STEPS = {
    "apply, a model": (lambda dag: piper.apply(Model(), []), "apply: expected a Dag, found Model"),
    "plan, a model": (lambda dag: piper.plan(Model()), "plan: expected a Dag, found Model"),
    "verify, a dag": (piper.verify, "verify: expected a Plan, found Dag; piper.plan makes one"),
    "simulate, a dag": (piper.simulate, "simulate: expected a Plan, found Dag"),
    "save_plan, a dag": (lambda dag: piper.save_plan(dag, "x"), "save_plan: expected a Plan"),
    "explain, a dag": (lambda dag: piper.explain(dag, "1"), "explain: expected a Plan, found Dag"),
    "simulate, costs": (lambda dag: piper.simulate(piper.plan(dag), 3), "costs are .*found 3"),
    "hardware, a number": (lambda dag: piper.hardware(3), "hardware: expected a str, found int"),
    "visualize, a plan": (
        lambda dag: piper.visualize(piper.plan(dag), "x.html"),
        "visualize: expected a Timeline, found Plan; piper.simulate",
    ),
    "visualize, nothing": (lambda dag: piper.visualize(None, "x.html"), "found NoneType"),
    "compare, a plan": (
        lambda dag: piper.visualize(piper.simulate(piper.plan(dag)), "x.html", compare=dag),
        "visualize: expected a Timeline, found Dag",
    ),
}


@pytest.mark.parametrize("wrong", STEPS)
def test_step_by_step(dag, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = STEPS[wrong]
    with pytest.raises(ConfigError, match=message):
        call(dag)


OTHERS = {
    "count, a text": (
        lambda: piper.schedules.one_f_one_b("2", 4),
        ScheduleError,
        "num_stages must be an integer, found '2'",
    ),
    "count, a fraction": (
        lambda: piper.schedules.gpipe(2, 4.0),
        ScheduleError,
        r"num_microbatches must be an integer, found 4\.0",
    ),
    "groups, devices": (
        lambda: piper.strategies.pipeline("1f1b", [0, 1], 4),
        PlacementError,
        r"a list of devices for each rank, such as \[\[0\], \[1\]\], found \[0, 1\]",
    ),
    "groups, a number": (lambda: piper.placements.chain(2), PlacementError, "found 2"),
    "annotated number": (
        lambda: piper.annotate_module(3, "PP", 0),
        AnnotationError,
        "annotate_module marks a torch.nn.Module, found int: 3",
    ),
    "operator, a typo": (
        lambda: compiled(strategy=[piper.Recompute({}, save=["matmull"])]),
        DirectiveError,
        "did you mean 'matmul'",
    ),
    "grouped_mm, shapes": (
        lambda: piper.grouped_mm(torch.ones(2, 3), torch.ones(3, 4), torch.tensor([2])),
        BatchError,
        r"weights \[G, k, m\].*\(2, 3\), \(3, 4\), \(1,\)",
    ),
    "check on ray": (
        lambda: piper.check(Model(), LOSS, STRATEGY, BATCH, optimizer=sgd, backend="ray"),
        piper.errors.CheckError,
        "use backend=\"inprocess\", found 'ray'",
    ),
    "check, no pair": (
        lambda: piper.check(Model(), LOSS, STRATEGY, BATCH[0], optimizer=sgd),
        BatchError,
        "a batch must be a pair",
    ),
}


@pytest.mark.parametrize("wrong", OTHERS)
def test_others(wrong):
    call, error, message = OTHERS[wrong]
    with pytest.raises(error, match=message):
        call()


def test_files_that_cannot_be_read_or_written(dag, tmp_path):
    planned = piper.plan(dag)
    (tmp_path / "file").write_text("")
    absent = tmp_path / "absent" / "file"
    with pytest.raises(StrategyFileError, match=f"cannot write strategy file {absent}"):
        piper.dump_strategy(STRATEGY, absent)
    with pytest.raises(PlanError, match="cannot write a plan into folder"):
        piper.save_plan(planned, tmp_path / "file")
    with pytest.raises(PlanError, match=f"cannot write timeline {absent}"):
        piper.simulate(planned).save(absent)
    with pytest.raises(PlanError, match=f"cannot read timeline {absent}"):
        piper.load_timeline(absent)


def test_python_names_the_nearest_public_name():
    with pytest.raises(AttributeError, match="has no attribute 'Plce'") as caught:
        piper.Plce  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("Plce", piper)
