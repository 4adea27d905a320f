"""What communication, sums and updates follow from where chunks are."""

import pytest
from msgspec.structs import replace
from tests.support.synthetic import Region, chain, network

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import DirectiveError, PlacementError
from piper.ir.core import core_chunks, core_values
from piper.ir.dag import Pass
from piper.ir.edit import replace_nodes
from piper.planner import plan
from piper.schedules.placements import chain as chained
from piper.schedules.placements import two_way
from piper.verify import verify


def comms(dag, kind):
    return [n for n in dag.comms() if n.work.kind == kind]


def works(dag, kind):
    return [n for n in dag.chunks() if n.work.kind == kind]


def single(stages):
    return chained([[s] for s in range(stages)])


def replicated(stages, **options):
    return [*chained([[2 * s, 2 * s + 1] for s in range(stages)]), Replicate({}, **options)]


def test_one_transfer_per_value_and_destination_group():
    # w0's result is read by stages 1, 2 and 3, and by their backward chunks; 2 and 3 share a
    # device.
    groups = [Place({"PP": 0}, [0]), Place({"PP": 1}, [1]), Place({"PP": [2, 3]}, [2])]
    dag = apply(chain(4, skip=True), groups)
    (skipped,) = dag.nodes[0].outputs
    sent = [t.groups for t in comms(dag, "transfer") if t.inputs == (skipped,)]
    assert sent == [((0, 1),), ((0, 2),)]
    assert all(t.groups for t in comms(dag, "transfer"))


def test_member_i_sends_to_member_i():
    dag = apply(chain(2), replicated(2))
    assert {t.groups for t in comms(dag, "transfer")} == {
        ((0, 2), (1, 3)),
        ((2, 0), (3, 1)),
    }


def test_no_communication_within_a_group():
    dag = apply(chain(3, skip=True), [Place({}, [0])])
    assert list(dag.comms()) == []
    assert len(works(dag, "update")) == 3  # one per region


def test_unequal_groups_are_refused():
    strategy = [Place({"PP": 0}, [0]), Place({"PP": 1}, [1, 2]), Replicate({})]
    with pytest.raises(PlacementError, match=r"'F PP=0' on devices \[0\].*\[1, 2\].*equal sizes"):
        apply(chain(2), strategy)


@pytest.mark.parametrize("second", [[0, 2], [1, 0], [2, 1]])
def test_linked_groups_that_overlap_are_refused(second):
    strategy = [Place({"PP": 0}, [0, 1]), Place({"PP": 1}, second), Replicate({})]
    with pytest.raises(PlacementError, match="must be the same, or share no device"):
        apply(chain(2), strategy)


def test_replicas_of_one_region_reduce_over_their_group():
    dag = apply(chain(2), replicated(2))
    assert [(c.groups, c.tags) for c in comms(dag, "all_reduce")] == [
        (((2, 3),), (("PP", 1),)),
        (((0, 1),), (("PP", 0),)),
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_tied_weights_over_stages_are_reduced_once_over_the_union(weighted):
    dag = apply(chain(3, tied=True, weighted=weighted), [*replicated(3), Split({}, "MB", 2)])
    reduced = [
        c for c in comms(dag, "all_reduce") if "w0" in {dag.values[v].name for v in c.inputs}
    ]
    assert [c.groups for c in reduced] == [((4, 5, 0, 1),)]
    (update,) = [u for u in works(dag, "update") if u.work.parameters == ("w0",)]
    assert set(update.devices) == {0, 1, 4, 5}
    sums = [s for s in works(dag, "sum") if dag.values[s.outputs[0]].name == "w0"]
    assert [(s.devices, len(s.inputs)) for s in sums] == [((4, 5), 2), ((0, 1), 2)]
    verify(plan(dag))


def test_two_directions_through_the_same_stages_share_parameters():
    dag = apply(
        chain(2, weighted=True),
        [Split({}, num_microbatches=4), *two_way([[0], [1]], 4)],
    )
    assert {c.groups for c in comms(dag, "all_reduce")} == {((0, 1),), ((1, 0),)}
    verify(plan(dag))


def test_a_weighted_loss_scales_every_update_by_the_weight_of_the_whole_batch():
    dag = apply(chain(3, weighted=True), [*replicated(3), Split({}, num_microbatches=4)])
    (weight,) = [
        c
        for c in comms(dag, "all_reduce")
        if c.tags == (("PP", 2),)
        and len(c.inputs) == 1
        and dag.values[c.inputs[0]].name == "weight"
    ]
    assert weight.groups == ((4, 5),)
    sent = [t for t in comms(dag, "transfer") if t.inputs == weight.outputs]
    assert {t.groups for t in sent} == {((4, 0), (5, 1)), ((4, 2), (5, 3))}
    assert {t.pass_ for t in sent} == {Pass.UPDATE}
    assert all(u.work.scaled for u in works(dag, "update"))
    verify(plan(dag))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_group_that_only_reads_a_parameter_updates_its_copy_too(weighted, replicas):
    # The last stage uses w0 without giving it a gradient: its copy must still follow.
    groups = [[replicas * s + r for r in range(replicas)] for s in range(3)]
    strategy = [*chained(groups), Replicate({}), Split({}, num_microbatches=2)]
    dag = apply(chain(3, detached=True, weighted=weighted), strategy)
    updates = [u for u in works(dag, "update") if u.work.parameters == ("w0",)]
    assert [list(u.devices) for u in updates] == [groups[0], groups[2]]
    verify(plan(dag))


@pytest.mark.parametrize("use", ["tied", "detached"])
def test_a_parameter_on_overlapping_groups_is_refused(use):
    # The first and the last stage share w0 and device 1, but exchange no value.
    groups = ([0, 1], [2, 3], [1, 4])
    strategy = [*(Place({"PP": s}, group) for s, group in enumerate(groups)), Replicate({})]
    apply(chain(3), strategy)
    with pytest.raises(PlacementError, match=r"'w0' is used on device groups .* share device 1"):
        apply(chain(3, **{use: True}), strategy)


def test_users_of_a_shared_parameter_are_replicated_alike():
    strategy = [
        *chained([[0, 1], [2, 3]]),
        Replicate({"PP": 0}),
        Replicate({"PP": 1}, bucket_size=1.0),
    ]
    apply(chain(2), strategy)
    with pytest.raises(
        DirectiveError,
        match=r"parameter 'w0' .* different options claim .*bucket_size differs between directives",
    ):
        apply(chain(2, tied=True), strategy)
    dag = apply(chain(2, tied=True), [*strategy[:3], Replicate({"PP": 1})])
    (reduced,) = (
        c for c in comms(dag, "all_reduce") if "w0" in {dag.values[v].name for v in c.inputs}
    )
    assert set(*reduced.groups) == {0, 1, 2, 3}
    verify(plan(dag))


@pytest.mark.parametrize(
    ("mib", "expected"),
    [
        (None, [["w0", "w1", "w2"]]),
        (1024 / 2**20, [["w0"], ["w1", "w2"]]),
        (1e-9, [["w0"], ["w1"], ["w2"]]),
    ],
)
def test_buckets(mib, expected):
    # Three parameters of 512 bytes in one region.
    dag = network([Region((), 0), Region((0,), 1), Region((1,), 2)], batch_size=64)

    dag = replace_nodes(dag, {n: replace(c, tags=(("R", 0),)) for n, c in dag.nodes.items()}).dag
    dag = apply(dag, [Replicate({}, [0, 1], bucket_size=mib)])
    found = [sorted({dag.values[v].name for v in c.inputs}) for c in comms(dag, "all_reduce")]
    assert sorted(found) == expected
    verify(plan(dag))


class TestBuffers:
    def test_replicas_must_choose(self):
        with pytest.raises(
            DirectiveError, match=r"writes buffer 'count' on replicas .*replicated_buffers"
        ):
            apply(chain(2, buffer=True), replicated(2))

    @pytest.mark.parametrize(("choice", "kind"), [("first", "broadcast"), ("mean", "all_reduce")])
    @pytest.mark.parametrize("place_first", [True, False])
    def test_choices(self, choice, kind, place_first):
        strategy = replicated(2, replicated_buffers=choice)
        dag = apply(chain(2, buffer=True), strategy if place_first else strategy[::-1])
        (store,) = works(dag, "store_buffer")
        (agree,) = [c for c in dag.comms() if c.outputs == store.inputs]
        assert (agree.work.kind, agree.groups) == (kind, ((0, 1),))
        assert store.devices == (0, 1)
        verify(plan(dag))

    def test_one_device_needs_no_choice(self):
        dag = apply(chain(2, buffer=True), [*single(2), Split({}, num_microbatches=4)])
        (store,) = works(dag, "store_buffer")
        last = [c for c in dag.chunks() if store.inputs[0] in c.outputs]
        assert [c.label for c in last] == ["F PP=0 MB=3"]

    def test_microbatches_on_different_devices_cannot_share_a_buffer(self):
        strategy = [
            Split({}, num_microbatches=2),
            Place({"MB": 0}, [0]),
            Place({"MB": 1}, [1]),
        ]
        with pytest.raises(
            PlacementError, match=r"buffer 'count' is written by 'F PP=0 MB=1' on \[1\]"
        ):
            apply(chain(2, buffer=True), strategy)

    def test_readers_placed_by_a_later_directive_are_not_refused_early(self):
        strategy = [
            Place({"PP": 0, "PASS": "F"}, [0]),
            Replicate({}),
            Place({"PP": 0, "PASS": "B"}, [0]),
            Place({"PP": 1}, [1]),
        ]
        apply(chain(2, buffer=True), strategy)


class TestIdentity:
    def test_derived_nodes_keep_their_ids_under_later_directives(self):
        before = apply(chain(3), replicated(3))
        after = apply(before, [Order([[{"PP": 0, "PASS": "F"}], [{"PP": 0, "PASS": "B"}]])])
        assert after.nodes == before.nodes
        assert after.values == before.values

    def test_an_order_of_communication_survives_what_does_not_touch_it(self):
        strategy = [
            Replicate({}),
            Place({"PP": 0}, [0, 1]),
            Order([[{"COMM": "all_reduce", "PP": 0}], [{"PASS": "UPDATE", "PP": 0}]]),
            Place({"PP": 1}, [2, 3]),
        ]
        dag = apply(chain(2), strategy)
        ((before, after),) = {(e.before, e.after) for e in dag.order}
        assert (dag.nodes[before].label, dag.nodes[after].label) == (
            "all_reduce UPDATE PP=0",
            "UPDATE PP=0",
        )

    def test_an_order_of_communication_that_changes_is_refused(self):
        order = Order([[{"COMM": "all_reduce", "PP": 0}], [{"PASS": "UPDATE", "PP": 0}]])
        with pytest.raises(
            DirectiveError, match=r"directive 3 ordered communication .* after the Split"
        ):
            apply(chain(2), [*replicated(2), order, Split({}, num_microbatches=2)])

    def test_the_core_is_what_was_captured(self):
        plain = chain(3, skip=True, tied=True, weighted=True)
        dag = apply(plain, replicated(3))
        assert {n: (c.inputs, c.outputs) for n, c in core_chunks(dag).items()} == {
            n: (c.inputs, c.outputs) for n, c in plain.nodes.items()
        }
        assert core_values(dag) == plain.values

    def test_the_result_does_not_depend_on_the_order_of_directives(self):
        place, replicate, split = chained([[0, 1], [2, 3]]), Replicate({}), Split({}, "MB", 2)

        def shape(strategy):
            dag = apply(chain(2, weighted=True), strategy)
            return sorted((n.label, n.participants) for n in dag.nodes.values())

        expected = shape([*place, replicate, split])
        assert shape([replicate, *place, split]) == expected
        assert shape([split, replicate, *place]) == expected
        assert shape([replicate, split, *place]) == expected
