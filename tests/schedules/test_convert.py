"""Strategies as torch.distributed.pipelining's files of actions, and back."""

import pytest
import torch
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.test_against_torch import RecordingStage
from tests.schedules.unit_time import needs

from piper.api.check import check
from piper.api.strategies import pipeline, stages_per_group
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.split import Split
from piper.errors import ScheduleError
from piper.models import MLP, MLPConfig, mlp_loss
from piper.schedules import SCHEDULES, one_f_one_b
from piper.schedules.actions import SHARDING
from piper.schedules.convert import actions_of_strategy, strategy_of_actions

ON_ONE_RANK = sorted(set(SCHEDULES) - {"dualpipe"})


def singles(num_ranks):
    return [[rank] for rank in range(num_ranks)]


def without_idle(text):
    return "".join(f"{','.join(c for c in row.split(',') if c)}\n" for row in text.splitlines())


# --- there and back -------------------------------------------------------------------------------


def test_by_hand():
    text = "0F0,0F1,,0I0,0W0,0B1\n,1F0,1B0,1F1,1B1\n"
    strategy = strategy_of_actions(text, stage_tag="STAGE", microbatch_tag="SAMPLE")

    def row(*cells):
        return Order([[{"STAGE": s, "SAMPLE": m, "PASS": p}] for s, p, m in cells])

    assert strategy == [
        Place({"STAGE": 0}, devices=[0]),
        Place({"STAGE": 1}, devices=[1]),
        Split({}, dim_name="SAMPLE", num_microbatches=2),
        row((0, "F", 0), (0, "F", 1), (0, "BI", 0), (0, "BW", 0), (0, "B", 1)),
        row((1, "F", 0), (1, "B", 0), (1, "F", 1), (1, "B", 1)),
    ]
    assert actions_of_strategy(strategy, stage_tag="STAGE") == without_idle(text)


@pytest.mark.parametrize("name", ON_ONE_RANK)
@settings(deadline=None, max_examples=30)
@given(num_ranks=st.integers(1, 5), more=st.integers(0, 6))
def test_every_schedule_there_and_back(name, num_ranks, more):
    count = 2 * num_ranks + more
    virtual = 2 if SCHEDULES[name].placement.virtual_stages else None
    orders = [
        directive
        for directive in pipeline(name, singles(num_ranks), count, num_virtual_stages=virtual)
        if isinstance(directive, Order)
    ]
    strategy = pipeline(name, singles(num_ranks), count, num_virtual_stages=virtual)
    text = actions_of_strategy(strategy)
    again = strategy_of_actions(text)
    assert [d for d in again if isinstance(d, Order)] == orders
    assert [d for d in again if isinstance(d, Split)] == [Split({}, num_microbatches=count)]
    assert actions_of_strategy(again) == text
    assert strategy_of_actions(text) == again
    placed = {d.filter["PP"]: d.devices for d in again if isinstance(d, Place)}
    assert placed == {d.filter["PP"]: d.devices for d in strategy if isinstance(d, Place)}


@st.composite
def legal_files(draw):
    """A file of actions in any order in which it can run, with idle steps anywhere."""
    num_ranks, virtual, count = (draw(st.integers(1, 3)) for _ in range(3))
    num_stages = num_ranks * virtual
    on = draw(st.permutations([s % num_ranks for s in range(num_stages)]))
    chunks = []
    for stage in range(num_stages):
        for m in range(count):
            halves = ["BI", "BW"] if draw(st.booleans()) else ["B"]
            chunks += [(p, stage, m) for p in ("F", *halves)]
    rows, done = [[] for _ in range(num_ranks)], set()
    while chunks:
        ready = [
            c
            for c in chunks
            if all(done & o for o in needs(c, num_stages)) and _forward_done(c, done)
        ]
        chunk = draw(st.sampled_from(ready))
        chunks.remove(chunk)
        done.add(chunk)
        pass_, stage, m = chunk
        rows[on[stage]].append(f"{stage}{ {'BI': 'I', 'BW': 'W'}.get(pass_, pass_) }{m}")
        if draw(st.integers(0, 5)) == 0:
            rows[on[stage]].append("")
    return "\n".join(map(",".join, rows)) + "\n"


def _forward_done(chunk, done):
    return chunk[0] == "F" or ("F", *chunk[1:]) in done


@settings(deadline=None, max_examples=80)
@given(text=legal_files())
def test_any_legal_file_there_and_back(text):
    assert actions_of_strategy(strategy_of_actions(text)) == without_idle(text)


# --- torch reads what we write, and we what torch writes ------------------------------------------


def torch_schedule(name, num_ranks, count):
    """A schedule of torch with as many stages, to load into."""
    per_rank = stages_per_group(name)
    styles = {
        1: (torch_schedules.ScheduleLoopedBFS, 1),
        2: (torch_schedules.ScheduleZBVZeroBubble, 2),
    }
    schedule_class, virtual = styles[per_rank]
    stages = [RecordingStage(v * num_ranks, num_ranks * virtual, num_ranks) for v in range(virtual)]
    return schedule_class(stages, count, loss_fn=lambda *_: None)


@pytest.mark.parametrize("name", ON_ONE_RANK)
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 4), (4, 8), (3, 7)])
def test_torch_loads_and_simulates_what_we_write(tmp_path, name, num_ranks, count):
    text = actions_of_strategy(pipeline(name, singles(num_ranks), count))
    path = tmp_path / "actions.csv"
    path.write_text(text)
    schedule = torch_schedule(name, num_ranks, count)
    schedule._load_csv(str(path))
    cells = [[str(a) for a in schedule.pipeline_order[rank]] for rank in range(num_ranks)]
    assert cells == [row.split(",") for row in text.splitlines()]
    if name == "dualpipev":
        return  # torch does not simulate overlap
    lowered = {
        rank: [a for a in actions if a.computation_type.value not in SHARDING]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    ranks = schedule.stage_index_to_group_rank
    torch_schedules._simulate_comms_compute(lowered, ranks.__getitem__, len(ranks))


@pytest.mark.parametrize("name", ["zb_h1", "zbv", "dualpipev"])
@pytest.mark.parametrize(("num_ranks", "count"), [(2, 4), (4, 8), (3, 7)])
def test_we_read_what_torch_writes_with_its_communication(tmp_path, name, num_ranks, count):
    orders = pipeline(name, singles(num_ranks), count)
    compute, lowered = tmp_path / "compute.csv", tmp_path / "lowered.csv"
    compute.write_text(actions_of_strategy(orders))
    schedule = torch_schedule(name, num_ranks, count)
    schedule._load_csv(str(compute))
    schedule._dump_csv(str(compute), format="compute_only")
    schedule._dump_csv(str(lowered), format="compute_comms")
    text = lowered.read_text()
    for word in ("SEND_F", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"):
        assert word in text
    assert strategy_of_actions(text) == strategy_of_actions(compute.read_text())
    assert actions_of_strategy(strategy_of_actions(text)) == actions_of_strategy(orders)


# --- mistakes in files of actions -----------------------------------------------------------------

SENDS = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_communication_is_left_out():
    assert strategy_of_actions(SENDS) == strategy_of_actions("0F0,0B0\n1F0,1B0\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected a row of actions per rank, such as 0F0,0F1,0B0,0B1; found none"),
        ("0F0,0X0,0B0", "rank 0 (row 1), cell 2, '0X0': unknown kind 'X'; known: F, B, I, W, SEND_F"),
        ("0F0,0SENDF0", "cell 2, '0SENDF0': unknown kind 'SENDF' (did you mean 'SEND_F'?)"),
        ("0F0,forward", "cell 2, 'forward': expected an action: stage, kind, microbatch, such as 0F3"),
        ("0F,0B0", "cell 1, '0F': F has a microbatch, as in 0F3"),
        ("0UNSHARD1,0F0", "cell 1, '0UNSHARD1': UNSHARD has no microbatch"),
        ("(0F0;0B0", "cell 1, '(0F0;0B0': expected a group like (0F3;1B2)OVERLAP_F_B"),
        ("0F0,(0B0;0B1)OVERLAP_F_B", "a forward may overlap a backward (B or I), found B, B"),
        ("0F0,0F1,0B0,0B1,0F0", "rank 0 (row 1), cell 5, '0F0': 0F0 is in cell 1 too"),
        ("0B0,0F0", "cell 1, '0B0': 0F0 must come before 0B0, on the same rank"),
        ("0F0,0W0,0I0", "cell 2, '0W0': 0I0 must come before 0W0"),
        ("0F0,0I0", "cell 1, '0F0': microbatch 0 of stage 0 needs one backward: B, or I and W; found I"),
        ("0F0,0B0,0I0,0W0", "needs one backward: B, or I and W; found B, I, W"),
        ("0F0,0B0\n1F0,1F1,1B0,1B1", "stage 0 has no forward of microbatch 1, 2 microbatches being"),
        ("0F0,0B0\n2F0,2B0", "stages count from 0 to 2, but no rank runs stage 1"),
        ("0F0,0B0\n1F0,1B0,0F1,0B1", "rank 1 (row 2), cell 3, '0F1': stage 0 is on rank 0 already"),
        ("0F0,1F0,0B0,1B0", "rank 0 (row 1), cell 3, '0B0' waits for 1B0"),
        (
            "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1",
            ("the ranks wait for each other for ever: rank 0 (row 1), cell 2, '0B0' waits for 1B0; "
            "rank 1 (row 2), cell 1, '1F1' waits for 0F1"),
        ),
        (SENDS.replace("1RECV_F0,", ""), "rank 0 (row 1), cell 2, '0SEND_F0': cannot be paired: rank 1 has no 1RECV_F0"),
        (SENDS.replace("0SEND_F0,", "").replace("1RECV_F0,", ""), "rank 1 (row 2), cell 1, '1F0': 1RECV_F0, which 1F0 waits for, is missing"),
        (SENDS.replace("0SEND_F0,", ""), "rank 1 (row 2), cell 1, '1RECV_F0': cannot be paired: rank 0 has no 0SEND_F0"),
        (SENDS.replace(",1SEND_B0", ""), "rank 0 (row 1), cell 3, '0RECV_B0': cannot be paired: rank 1 has no 1SEND_B0"),
        (SENDS.replace("1RECV_F0,1F0", "1F0,1RECV_F0"), "cell 1, '1F0': 1RECV_F0, which 1F0 waits for, comes later, in cell 2"),
        (SENDS.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), "cell 1, '0SEND_F0': 0F0 must come before it"),
        (SENDS.replace("1F0,1B0", "1F0,1SEND_F0,1B0"), "cell 3, '1SEND_F0': cannot be paired: no other rank has stage 2"),
        (SENDS.replace("1B0,", "1B0,1SEND_B0,"), "cell 5, '1SEND_B0': 1SEND_B0 is there twice"),
        (
            ("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"),
            "rank 1 (row 2), cell 1, '1RECV_F1': cannot be paired: rank 0 sends what 1RECV_F0 waits for first",
        ),
        ("0UNSHARD,0F0,0RESHARD,0B0", "cell 4, '0B0': stage 0 is not gathered: 0UNSHARD must come first"),
        ("0UNSHARD,0F0,0UNSHARD,0B0", "cell 3, '0UNSHARD': stage 0 is gathered already, by rank 0 (row 1), cell 1"),
        ("0UNSHARD,0F0,0B0", "cell 1, '0UNSHARD': no 0RESHARD follows"),
        ("0F0,0B0,0RESHARD", "cell 3, '0RESHARD': stage 0 is not gathered: no 0UNSHARD before it"),
        ("0F0,0REDUCE_GRAD,0B0", "gradients are reduced once, after the last: work of the stage follows"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", "reduced once, after the last: it is there twice"),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_of_actions(text, complaint):
    with pytest.raises(ScheduleError) as caught:
        strategy_of_actions(text)
    assert complaint in str(caught.value)


# --- strategies that a file of actions cannot say -------------------------------------------------


def place(stage, *devices, **filter_):
    return Place({"PP": stage, **filter_}, devices=list(devices))


def chunk(stage, pass_, microbatch=0, **more):
    return {"PP": stage, "MB": microbatch, "PASS": pass_, **more}


ONE = [[chunk(0, "F")], [chunk(0, "B")]]


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ([place(0, 0)], "the strategy has no Order, so there is no schedule to write"),
        ([Split({}, "A", 2), Split({}, "B", 2), Order(ONE)], "one split, found A, B"),
        ([Order([[{"PP": 0, "PASS": "F"}]])],
         "directive 0, filters[0], {'PP': 0, 'PASS': 'F'}: an action is one chunk, such as"),
        ([Order([[chunk([0, 1], "F")]])], "an action is one chunk"),
        ([Order([[chunk(0, "F", EP=1)]])], "an action is one chunk"),
        ([Order([[chunk(0, "UPDATE")]])], "its pass one of F, B, BI, BW"),
        ([place(1, 0), Order(ONE)], "no Place says where stage 0 is"),
        ([place(0, 0), Order(ONE[:1]), Order(ONE[1:])],
         "directive 2, filters[0], {'PP': 0, 'MB': 0, 'PASS': 'B'}: directive 1 orders that rank already"),
        ([Order([[chunk(0, "F"), chunk(0, "F", 1)]])],
         "directive 0, filters[0]: a forward may overlap a backward (B or I), found F, F"),
        ([Order(ONE[:1])], "microbatch 0 of stage 0 needs one backward"),
        (pipeline("dualpipe", singles(2), 4), "stage 0 is on [0] and on [1]; a file of actions has each"),
    ],
)  # fmt: skip
def test_what_a_file_of_actions_cannot_say(strategy, complaint):
    with pytest.raises(ScheduleError) as caught:
        actions_of_strategy(strategy)
    assert complaint in str(caught.value)


def test_rows_are_device_groups():
    strategy = [
        *(place(s, *devices) for s, devices in enumerate([(1, 3), (0, 2)])),
        Place({"PP": 0, "EP": "*"}, devices=[7]),
        *one_f_one_b(2, 2),
    ]
    assert actions_of_strategy(strategy) == "1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n"


def test_without_a_placement_each_order_is_a_row():
    assert actions_of_strategy(one_f_one_b(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_one_order_may_speak_of_several_ranks():
    both = [chunk(0, "F"), chunk(1, "F"), chunk(1, "B"), chunk(0, "B")]
    strategy = [place(0, 0), place([1, 2], 1), Order([[c] for c in both])]
    assert actions_of_strategy(strategy) == "0F0,0B0\n1F0,1B0\n"


def test_what_is_read_runs():
    strategy = strategy_of_actions("0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n")
    model = MLP(MLPConfig(in_features=3, width=4, out_features=2, num_layers=2, num_stages=2))
    batch = torch.randn(4, 3), torch.randn(4, 2)
    check(model, mlp_loss, strategy, batch, optimizer=torch.optim.SGD).require()
