"""What a user relies on when planning: refusals, and programs that do what the DAG says."""

import itertools
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from tests.support.synthetic import chain, refitted

from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import CaptureError, PlacementError, SplitError
from piper.ids import NodeId, ValueId
from piper.ir.dag import Dag, Pass, Role
from piper.ir.edit import replace_nodes
from piper.ops.accumulate import Accumulate
from piper.ops.compute import Compute
from piper.ops.free import Free
from piper.ops.p2p import PostReceive, Send
from piper.ops.report import Report
from piper.ops.update import OptimizerStep
from piper.ops.wait import Wait
from piper.planner import microbatch_size, plan, violated_guard
from piper.schedules.one_f_one_b import one_f_one_b
from piper.schedules.placements import chain as chained
from piper.verify import find_problems, verify


def pipeline(stages, microbatches, replicas=1):
    groups = [[replicas * s + r for r in range(replicas)] for s in range(stages)]
    return [
        *chained(groups),
        Replicate({}, replicated_buffers="first"),
        Split({}, num_microbatches=microbatches),
        *one_f_one_b(stages, microbatches),
    ]


def of(kind, device):
    return [i for i in device.instructions if isinstance(i, kind)]


VARIANTS = {
    "plain": {},
    "tied": {"tied": True},
    "detached": {"detached": True},
    "skips": {"skip": True},
    "several results": {"multi": True},
    "buffer": {"buffer": True},
    "weighted": {"weighted": True},
    "whole leaf": {"whole": True},
    "all": dict.fromkeys(("tied", "skip", "multi", "buffer", "weighted", "whole"), True),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("microbatches", [1, 3, 6])
@pytest.mark.parametrize("replicas", [1, 2])
def test_plans_of_every_variant_verify(variant, microbatches, replicas):
    dag = chain(3, batch_size=96, **VARIANTS[variant])
    planned = plan(apply(dag, pipeline(3, microbatches, replicas)))
    verify(planned)
    assert (planned.num_replicas, planned.num_microbatches) == (replicas, microbatches)
    assert planned.microbatch_size == 96 // replicas // microbatches
    pieces = replicas * microbatches
    assert planned.seed_value == (1.0 if dag.weights else 1 / pieces)
    reports = [i for d in planned.devices for i in of(Report, d)]
    assert sorted((i.name, i.microbatch) for i in reports) == sorted(
        itertools.product(["loss", "weight"] if dag.weights else ["loss"], range(pieces))
    )


class TestRefusals:
    def test_unplaced_region_is_named(self):
        strategy = [Place({"PP": [0, 2]}, [0]), Split({}, num_microbatches=2)]
        with pytest.raises(PlacementError) as caught:
            plan(apply(chain(3), strategy))
        assert "4 of 12 chunks are not placed on any device: regions {'PP': 1}" in str(caught.value)
        assert "tags: MB 0, 1, PP 0–2" in str(caught.value)

    def test_nothing_placed_runs_on_device_0(self):
        planned = plan(chain(2))
        verify(planned)
        assert planned.num_devices == 1

    def test_device_numbers_without_gaps(self):
        strategy = [Place({"PP": 0}, [0]), Place({"PP": 1}, [4])]
        with pytest.raises(PlacementError, match="uses device 4, but nothing runs on 1, 2, 3"):
            plan(apply(chain(2), strategy))

    def test_chunks_that_exchange_nothing_still_need_groups_of_one_size(self):
        # A chunk that counts steps is linked to nothing, so no transfer shows the difference.
        dag = chain(2)
        lonely = replace_struct(
            dag.nodes[0], id=NodeId(99), inputs=(), outputs=(), tags=(("PP", 2),)
        )
        dag = replace_nodes(dag, {NodeId(99): lonely}).dag
        strategy = [Place({"PP": [0, 1]}, [0, 1]), Place({"PP": 2}, [2]), Replicate({})]
        with pytest.raises(PlacementError, match=r"equal sizes .*\[0, 1\] and 'F PP=2' on \[2\]"):
            plan(apply(dag, strategy))

    def test_batch_that_does_not_divide(self):
        dag = apply(chain(2, batch_size=10), [Replicate({}, [0, 1, 2])])
        with pytest.raises(
            SplitError, match=r"10 rows .* 3 replicas × 1 microbatches.* multiple of 3"
        ):
            plan(dag)

    def test_guards(self):
        dag = replace(chain(2, batch_size=8), guards=("s0 >= 2", "s0 % 3 != 2"))
        assert violated_guard(dag, 8) == "s0 % 3 != 2"
        assert violated_guard(dag, 4) is None
        with pytest.raises(CaptureError, match=r"'s0 % 3 != 2'.* 8 rows; .*batch_size=8"):
            plan(dag)
        plan(apply(dag, [Split({}, num_microbatches=2)]))

    def test_a_graph_captured_at_one_size_holds_at_that_size(self):
        fixed = replace(chain(2, batch_size=8), batch_symbol=None, captured_size=4)
        assert violated_guard(fixed, 4) is None
        assert violated_guard(fixed, 8) == "rows == 4"
        assert microbatch_size(apply(fixed, [Split({}, num_microbatches=2)])) == 4


class TestPrograms:
    def test_issue_order_of_each_device_is_the_schedule(self):
        planned = plan(apply(chain(3), pipeline(3, 4)))

        def steps(device):
            nodes = [planned.dag.nodes[i.node] for i in of(Compute, planned.devices[device])]
            return [f"{n.pass_.value}{dict(n.tags)['MB']}" for n in nodes]

        assert steps(0) == ["F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"]
        assert steps(2) == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"]

    @pytest.mark.parametrize("variant", ["plain", "tied", "skips", "weighted", "buffer"])
    def test_no_wait_can_be_left_out(self, variant):
        planned = plan(apply(chain(3, batch_size=96, **VARIANTS[variant]), pipeline(3, 3, 2)))
        assert find_problems(planned) == []
        waits = 0
        for d, device in enumerate(planned.devices[:3]):
            for at, instruction in enumerate(device.instructions):
                if isinstance(instruction, Wait):
                    waits += 1
                    program = device.instructions[:at] + device.instructions[at + 1 :]
                    devices = list(planned.devices)
                    devices[d] = replace_struct(device, instructions=program)
                    assert find_problems(replace(planned, devices=tuple(devices))), (d, at)
        assert waits > 20

    def test_frees_come_right_after_the_last_use(self):
        planned = plan(apply(chain(3, tied=True, multi=True), pipeline(3, 4)))
        for device in planned.devices:
            touched = None
            for i in device.instructions:
                if isinstance(i, Free):
                    # What an instruction was the last to use, or what nobody will use, goes at
                    # once.
                    assert set(i.slots) <= touched
                elif not isinstance(i, Wait):
                    touched = {*i.reads(), *i.writes()}

    def test_a_value_sent_to_two_devices_does_not_hold_up_the_next_chunk(self):
        # Freeing it needs both sends to be complete; a host that waits for that right away computes
        # nothing meanwhile.
        planned = plan(apply(chain(3, skip=True), pipeline(3, 4)))
        verify(planned)
        program = planned.devices[0].instructions
        sent = {i.record: at for at, i in enumerate(program) if isinstance(i, Send)}
        chunks = [at for at, i in enumerate(program) if isinstance(i, Compute)]
        waits = [
            (at, sent[i.event])
            for at, i in enumerate(program)
            if isinstance(i, Wait) and i.event in sent
        ]
        assert len(waits) >= 4
        for at, send in waits:
            assert any(send < chunk < at for chunk in chunks)
            assert program[at].stream != "compute"

    def test_each_contribution_but_the_first_is_added_in_place(self):
        (device,) = plan(apply(chain(2), [Split({}, num_microbatches=4)])).devices
        sums = of(Accumulate, device)
        assert len(sums) == 2 * 3  # three additions for each of two weights
        fresh = [i for i in sums if i.totals != i.left]
        assert len(fresh) == 2  # the first makes a new tensor

    def test_a_sum_of_one_is_the_contribution_itself(self):
        (device,) = plan(chain(2)).devices
        assert of(Accumulate, device) == []
        made = {s for i in of(Compute, device) for s in i.outputs}
        for i in of(OptimizerStep, device):
            assert set(i.gradients) <= made

    def test_a_chunk_sends_before_its_gradient_is_added(self):
        planned = plan(apply(chain(2), pipeline(2, 4)))
        kinds = [
            type(i) for i in planned.devices[1].instructions if not isinstance(i, (Wait, Free))
        ]
        adds = [at for at, kind in enumerate(kinds) if kind is Accumulate]
        assert adds
        assert all(kinds[at - 1] is Send for at in adds[:-1])

    def test_a_value_that_is_reported_and_read_and_sent_stays_until_all_is_done(self):
        # The loss is read by the first stage's backward too.
        dag = chain(2)
        (loss,) = dag.losses
        first = next(c for c in dag.chunks() if c.pass_ is Pass.BACKWARD and c.tags == (("PP", 0),))
        last = next(c for c in dag.chunks() if c.pass_ is Pass.BACKWARD and c.tags == (("PP", 1),))
        changed = {
            c.id: replace_struct(c, inputs=(*c.inputs, loss), work=dag.nodes[c.id].work)
            for c in (first, last)
        }
        planned = plan(apply(refitted(replace_nodes(dag, changed).dag), pipeline(2, 2)))
        verify(planned)
        assert len(of(Send, planned.devices[1])) == 2 * 2

    def test_an_input_used_twice_by_one_chunk(self):
        dag = chain(2)
        chunk = dag.nodes[1]
        doubled = replace_struct(chunk, inputs=(*chunk.inputs, chunk.inputs[0]))
        verify(plan(apply(refitted(replace_nodes(dag, {chunk.id: doubled}).dag), pipeline(2, 2))))

    def test_results_that_nothing_reads_are_freed(self):
        planned = plan(forward_only(chain(3, multi=True)))
        verify(planned)
        (device,) = planned.devices
        freed = [s for i in of(Free, device) for s in i.slots]
        assert sorted(freed) == sorted(
            s for s, info in enumerate(device.slots) if info.role not in (Role.PARAMETER, Role.SEED)
        )

    def test_chunks_without_inputs_or_outputs(self):
        dag = chain(2)
        lonely = {
            NodeId(90 + i): replace_struct(
                dag.nodes[0], id=NodeId(90 + i), inputs=inputs, outputs=()
            )
            for i, inputs in enumerate([(), (ValueId(0),)])
        }
        verify(plan(apply(refitted(replace_nodes(dag, lonely).dag), pipeline(2, 2))))

    @pytest.mark.parametrize("weighted", [False, True])
    def test_evaluation_has_no_updates(self, weighted):
        dag = forward_only(chain(3, weighted=weighted))
        strategy = [d for d in pipeline(3, 4, 2) if type(d).__name__ != "Order"]
        planned = plan(apply(dag, strategy))
        verify(planned)
        assert not any(of(OptimizerStep, d) for d in planned.devices)
        assert len([i for d in planned.devices for i in of(Report, d)]) == 8 * (1 + weighted)


class TestReceives:
    def test_all_are_posted_first_if_memory_allows(self):
        device = plan(apply(chain(2), pipeline(2, 4)), receive_bytes=2**40).devices[1]
        kinds = [type(i) for i in device.instructions]
        assert kinds[:4] == [PostReceive] * 4
        assert PostReceive not in kinds[4:]

    def test_the_limit_bounds_what_early_posting_adds(self):
        dag = apply(chain(3, skip=True), pipeline(3, 8))

        def peaks(receive_bytes):
            planned = plan(dag, receive_bytes=receive_bytes)
            verify(planned)
            return [most_posted(device) for device in planned.devices]

        as_they_come, unlimited = peaks(0), peaks(2**40)
        for limit in (1, 16384, 40000, 100000):
            for least, found in zip(as_they_come, peaks(limit), strict=True):
                assert least <= found <= least + limit
        assert all(found > least for least, found in zip(as_they_come, unlimited, strict=True))


def most_posted(device):
    """The most bytes in buffers of receives that were posted and not read yet."""
    waiting, most = {}, 0
    for i in device.instructions:
        for slot in i.reads():
            waiting.pop(slot, None)
        if isinstance(i, PostReceive):
            waiting[i.slot] = i.message.nbytes
            most = max(most, sum(waiting.values()))
    return most


def forward_only(dag: Dag) -> Dag:
    """*dag* as evaluation captures it."""
    nodes = {n: c for n, c in dag.nodes.items() if c.pass_ is Pass.FORWARD}
    made = {v for c in nodes.values() for v in c.outputs}
    read = {v for c in nodes.values() for v in c.inputs}
    values = {v: value for v, value in dag.values.items() if v in made | read}
    return replace(dag, nodes=nodes, values=values, contributions={})
