import pytest
from tests.support.synthetic import chain

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import DirectiveError, OrderError, SplitError
from piper.ir.dag import Role
from piper.ops.compute import Compute
from piper.ops.load_input import LoadInput
from piper.ops.report import Report
from piper.planner import plan
from piper.verify import verify


def test_copies_every_chunk_and_keeps_one_sum_per_parameter():
    dag = apply(chain(2), [Split({}, num_microbatches=4)])
    core = [c for c in dag.chunks() if not c.derived]
    assert len(core) == 4 * 4
    assert sorted(c.label for c in core if c.label.startswith("F PP=1")) == [
        f"F PP=1 MB={m}" for m in range(4)
    ]
    assert [len(c.inputs) for c in dag.chunks() if c.work.kind == "sum"] == [4, 4]
    assert {n: len(vs) for n, vs in dag.contributions.items()} == {"w0": 4, "w1": 4}
    assert len(dag.losses) == 4


def test_inputs_are_divided_parameters_shared_whole_leaves_shared():
    dag = apply(chain(2, whole=True), [Split({}, num_microbatches=2)])
    found = {}
    for value in dag.values.values():
        found.setdefault((value.role, value.name), []).append(value.microbatch)
    assert found[Role.INPUT, "inputs"] == [0, 1]
    assert found[Role.INPUT, "mask"] == [0]
    assert found[Role.PARAMETER, "w0"] == [0]


@pytest.mark.parametrize("split_first", [True, False])
def test_commutes_with_replicate_microbatch_m_of_replica_r_is_number_rm_plus_m(split_first):
    split, replicate = Split({}, num_microbatches=4), Replicate({}, [0, 1])
    strategy = [split, replicate] if split_first else [replicate, split]
    planned = plan(apply(chain(2, weighted=True, whole=True), strategy))
    verify(planned)
    for device in planned.devices:
        kinds = {Compute: set(), LoadInput: set(), Report: set()}
        for i in device.instructions:
            if type(i) in kinds:
                kinds[type(i)].add(i.microbatch)
        numbers = set(range(4 * device.device, 4 * device.device + 4))
        assert set(map(frozenset, kinds.values())) == {frozenset(numbers)}


def test_the_computation_and_its_rows_agree():
    # Each forward of stage 0 reads what was loaded for its own microbatch.
    (device,) = plan(apply(chain(2), [Split({}, num_microbatches=4)])).devices
    loaded = {i.slot: i.microbatch for i in device.instructions if isinstance(i, LoadInput)}
    for i in device.instructions:
        if isinstance(i, Compute):
            assert {loaded[s] for s in i.inputs if s in loaded} <= {i.microbatch}
    assert sorted(loaded.values()) == [0, 1, 2, 3]


def test_nested_splits_number_microbatches_as_one_split_would():
    strategy = [Split({}, num_microbatches=2), Split({}, "SUB", 3)]
    nested = apply(chain(2, batch_size=48), strategy)
    flat = apply(chain(2, batch_size=48), [Split({}, num_microbatches=6)])
    assert nested.num_microbatches == flat.num_microbatches == 6
    for chunk in nested.chunks():
        if not chunk.derived:
            tags = dict(chunk.tags)
            assert nested.microbatch(chunk.tags) == 3 * tags["MB"] + tags["SUB"]
    for value in nested.values.values():
        if value.role is Role.INPUT:
            readers = {nested.microbatch(nested.nodes[n].tags) for n in nested.consumers[value.id]}
            assert readers == {value.microbatch}
    losses = [nested.microbatch(nested.nodes[nested.producers[v]].tags) for v in nested.losses]
    assert losses == list(range(6))
    verify(plan(nested))


def test_a_buffer_passes_from_each_microbatch_to_the_next():
    dag = apply(chain(2, buffer=True), [Split({}, num_microbatches=4)])
    stages = sorted(
        (c for c in dag.chunks() if c.label.startswith("F PP=0")), key=lambda c: c.label
    )
    writers = [None, *(c.outputs[-1] for c in stages)]
    for before, chunk in zip(writers, stages, strict=False):
        state = chunk.inputs[-1]
        assert dag.values[state].role is Role.BUFFER if before is None else state == before
    assert dag.buffer_updates["count"] == writers[-1]
    verify(plan(dag))


def test_an_order_against_a_buffer_is_a_cycle():
    backwards = Order([[{"PP": 0, "MB": 1, "PASS": "F"}], [{"PP": 0, "MB": 0, "PASS": "F"}]])
    apply(chain(2), [Split({}, num_microbatches=2), backwards])
    with pytest.raises(OrderError, match=r"F PP=0 MB=0 +before +F PP=0 MB=1 +\(data\)"):
        apply(chain(2, buffer=True), [Split({}, num_microbatches=2), backwards])


def test_buffers_refuse_a_second_split():
    with pytest.raises(SplitError, match=r"writes buffers \(count\) can be split only once"):
        apply(chain(2, buffer=True), [Split({}, num_microbatches=2), Split({}, "SUB", 2)])


@pytest.mark.parametrize(
    "filter_",
    [{"PP": 0}, {"PASS": "F"}, {"PASS": "BI"}, {"PP": []}],
    ids=["a region", "a pass", "a pass that is nowhere", "nothing"],
)
def test_a_filter_that_leaves_chunks_out_is_refused(filter_):
    with pytest.raises(SplitError, match=r"leaves out \d+ chunks, .*Split\(\{\}"):
        apply(chain(2), [Split(filter_, num_microbatches=2)])


def test_splitting_some_microbatches_again_is_refused():
    with pytest.raises(SplitError, match=r"leaves out 4 chunks, 'F PP=0 MB=1'"):
        apply(chain(2), [Split({}, num_microbatches=2), Split({"MB": 0}, "SUB", 2)])


@pytest.mark.parametrize(
    ("batch", "strategy", "complaint"),
    [
        (
            10,
            [Split({}, num_microbatches=4)],
            "batch of 10 rows does not divide into 4 microbatches",
        ),
        (
            12,
            [Split({}, num_microbatches=2), Split({}, "SUB", 4)],
            "12 rows does not divide into 8",
        ),
        (8, [Split({}, num_microbatches=0)], "at least 1, found 0"),
        (8, [Split({}, "PASS", 2)], "'PASS' is reserved"),
        (8, [Split({}, "PP", 2)], "'PP' is a tag of the DAG already"),
        (
            8,
            [Split({}, num_microbatches=2), Split({}, num_microbatches=2)],
            "'MB' is a tag of the DAG already",
        ),
    ],
)
def test_refusals(batch, strategy, complaint):
    with pytest.raises(SplitError) as caught:
        apply(chain(2, batch_size=batch), strategy)
    assert complaint in str(caught.value)
    assert f"directive {len(strategy) - 1}, Split(" in str(caught.value)


def test_replicas_and_microbatches_together_must_divide_the_batch():
    strategy = [Split({}, num_microbatches=4), Replicate({}, [0, 1])]
    with pytest.raises(SplitError, match=r"batch of 12 rows .* 2 replicas × 4 microbatches"):
        plan(apply(chain(2, batch_size=12), strategy))


def test_an_order_made_before_the_split_holds_within_each_microbatch():
    order = Order([[{"PP": 1, "PASS": "F"}], [{"PP": 0, "PASS": "B"}]])
    dag = apply(chain(2), [Place({}, [0]), order, Split({}, num_microbatches=2)])
    assert sorted((dag.nodes[e.before].label, dag.nodes[e.after].label) for e in dag.order) == [
        (f"F PP=1 MB={m}", f"B PP=0 MB={m}") for m in range(2)
    ]


def test_an_order_of_updates_made_before_the_split_is_refused_not_dropped():
    order = Order([[{"PP": 1, "PASS": "UPDATE"}], [{"PP": 0, "PASS": "UPDATE"}]])
    with pytest.raises(DirectiveError, match=r"directive 1 ordered .* after the Split"):
        apply(chain(2), [Place({}, [0]), order, Split({}, num_microbatches=2)])
