"""A correct plan passes with the right counts; each kind of mistake is found, by the check whose
business it is.
"""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from tests.verify.dags import chain, handed_out_view
from tests.verify.plans import (
    CASES,
    case,
    checks,
    drop,
    edit,
    find,
    make,
    move,
    pipeline,
    spoil,
    swap,
    texts,
)

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.errors import VerificationError
from piper.ids import EventId, NodeId, Slot, Stream
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.base import Message
from piper.ops.compute import Compute
from piper.ops.free import Free
from piper.ops.load_input import LoadInput
from piper.ops.p2p import PostReceive, Send
from piper.ops.report import Report
from piper.ops.update import OptimizerStep
from piper.ops.wait import Wait
from piper.ops.write_buffer import WriteBuffer
from piper.plan.model import CommunicatorInfo
from piper.planner import plan as make_plan
from piper.verify import find_problems, verify
from piper.verify.deadlock import Execution
from piper.verify.structure import check_structure
from piper.verify.trace import describe


@pytest.mark.parametrize("name", CASES)
def test_correct_plans_pass(name):
    verify(case(name))


def test_report_counts():
    report = verify(case("1f1b × dp"))
    assert (report.devices, report.parameters) == (4, 2)
    assert report.messages == 2 * 4 * 2, "each way between two stages, per microbatch and replica"
    assert report.collectives == 2, "one all-reduce per stage"
    assert "16 messages and 2 collectives" in str(report)


def test_error_lists_problems_with_place_and_node():
    plan = case("1f1b")
    with pytest.raises(VerificationError) as error:
        verify(drop(plan, 0, find(plan, 0, Compute, 1)))
    assert "must not run" in str(error.value)
    assert "[F PP=0 MB=1] is never executed" in str(error.value)
    assert "device 0" in str(error.value)


class TestStructure:
    def test_device_numbers(self):
        plan = case("1f1b")
        assert "0 to 1 in order" in texts(replace(plan, devices=plan.devices[::-1]), "structure")

    def test_seed_value(self):
        assert "0.25" in texts(replace(case("1f1b"), seed_value=1.0), "structure")

    def test_microbatch_size_and_guards(self):
        plan = case("1f1b")
        assert "bound to 4" in texts(replace(plan, microbatch_size=2), "structure")
        guarded = replace(plan, dag=replace(plan.dag, guards=("s0 >= 8",)))
        assert "s0 >= 8" in texts(guarded, "structure")

    def test_replicas_and_microbatches(self):
        assert "2 replicas" in texts(replace(case("1f1b"), num_replicas=2), "structure")
        assert "8 microbatches" in texts(replace(case("1f1b"), num_microbatches=8), "structure")

    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"outputs": (Slot(999),)}, "%999 does not exist"),
            ({"inputs": (Slot(-1), Slot(0))}, "%-1 does not exist"),
            ({"node": NodeId(9999)}, "node 9999 is not in the DAG"),
            ({"stream": Stream("")}, "no name"),
        ],
    )
    def test_instruction_fields(self, fields, says):
        plan = case("1f1b")
        assert says in texts(edit(plan, 0, find(plan, 0, Compute), **fields), "structure")

    def test_slot_table(self):
        plan = case("1f1b")

        def with_slot(number, **fields):
            device = plan.devices[0]
            slots = list(device.slots)
            slots[number] = replace_struct(slots[number], **fields)
            spoiled = replace_struct(device, slots=tuple(slots))
            return texts(replace(plan, devices=(spoiled, *plan.devices[1:])), "structure")

        assert "which the DAG does not have" in with_slot(0, value=999)
        assert "slot %0 says" in with_slot(0, name="other")
        assert "float32" in with_slot(0, message=Message((3, 3), "float32"))
        twin = plan.devices[0].slots[0]
        fields = {name: getattr(twin, name) for name in twin.__struct_fields__}
        assert "both hold value" in with_slot(1, **fields)

    def test_communicators(self):
        plan = case("dp")
        (info,) = plan.communicators

        def with_info(*infos):
            return texts(replace(plan, communicators=infos), "structure")

        assert "is not listed in the plan" in with_info()
        assert "listed twice" in with_info(info, info)
        assert "different members" in with_info(CommunicatorInfo(info.name, (0, 0)))
        assert "outside" in with_info(CommunicatorInfo(info.name, (0, 7)))
        assert "the instruction says" in with_info(CommunicatorInfo(info.name, (1, 0)))

    def test_direction_of_a_message(self):
        plan = case("1f1b")
        send = find(plan, 0, Send)
        other = next(c for c in plan.communicators if c.members == (1, 0))
        spoiled = edit(plan, 0, send, communicator=other.name, sender=1, receiver=0)
        assert "cannot send" in texts(spoiled, "structure")

    def test_lengths(self):
        plan = case("1f1b")
        spoiled = edit(plan, 0, find(plan, 0, Accumulate), left=())
        assert "lengths" in texts(spoiled, "structure")
        spoiled = edit(plan, 0, find(plan, 0, OptimizerStep), names=("w0", "w0"))
        assert "lengths" in texts(spoiled, "structure")


class TestEvents:
    def test_event_recorded_twice(self):
        plan = case("1f1b")
        one, two = find(plan, 0, Compute, 0), find(plan, 0, Compute, 1)
        event = plan.devices[0].instructions[one].record
        assert "recorded already" in texts(edit(plan, 0, two, record=event), "events")

    def test_wait_before_the_event_is_recorded(self):
        plan = case("1f1b")
        wait = find(plan, 1, Wait)
        assert "not recorded by an earlier" in texts(move(plan, 1, wait, 0), "events")
        unknown = edit(plan, 1, wait, event=EventId(12345))
        assert "e12345 is not recorded" in texts(unknown, "events")

    def test_wait_cannot_record(self):
        plan = case("1f1b")
        spoiled = edit(plan, 1, find(plan, 1, Wait), record=EventId(777))
        assert "cannot record" in texts(spoiled, "events")


class TestFidelity:
    @pytest.mark.parametrize(
        ("fields", "says"),
        [
            ({"body": "0" * 24}, "expected body"),
            ({"microbatch": 3}, "expected global microbatch 0, found 3"),
            ({"rng": (5,)}, "random streams"),
            ({"stream": Stream("side")}, "expected stream 'compute'"),
        ],
    )
    def test_compute_fields(self, fields, says):
        plan = case("1f1b")
        assert says in texts(edit(plan, 0, find(plan, 0, Compute), **fields), "fidelity")

    def test_inputs_in_the_wrong_order(self):
        plan = case("1f1b")
        at = find(plan, 0, Compute)
        inputs = plan.devices[0].instructions[at].inputs
        assert "reads" in texts(edit(plan, 0, at, inputs=inputs[::-1]), "fidelity")

    def test_node_executed_twice_or_never(self):
        plan = case("1f1b")
        at = find(plan, 0, Compute)
        twice = spoil(plan, 0, lambda p: [*p[: at + 1], p[at], *p[at + 1 :]])
        assert "a second time" in texts(twice, "fidelity")
        assert "never executed" in texts(drop(plan, 0, at), "fidelity")

    def test_node_on_the_wrong_device(self):
        plan = case("1f1b × dp")
        node = plan.devices[2].instructions[find(plan, 2, Compute)].node
        spoiled = edit(plan, 0, find(plan, 0, Compute), node=node)
        assert "belongs on devices (2, 3)" in texts(spoiled, "fidelity")

    def test_microbatch_of_the_other_replica(self):
        plan = case("dp")
        at = find(plan, 1, LoadInput)
        assert plan.devices[1].instructions[at].microbatch == 4
        assert "microbatch 0, expected 4" in texts(edit(plan, 1, at, microbatch=0), "fidelity")

    def test_batch_leaf(self):
        plan = case("dp")
        at = find(plan, 0, LoadInput)
        leaf = plan.devices[0].instructions[at].leaf
        assert "expected batch leaf" in texts(edit(plan, 0, at, leaf=1 - leaf), "fidelity")

    def test_report(self):
        plan = case("weighted")
        at = find(plan, 2, Report)
        assert "expected to report" in texts(edit(plan, 2, at, microbatch=1), "fidelity")
        assert "expected to report" in texts(edit(plan, 2, at, name="other"), "fidelity")
        assert "never reported" in texts(drop(plan, 2, at), "fidelity")
        twice = spoil(plan, 2, lambda p: [*p[:at], p[at], *p[at:]])
        assert "reported twice" in texts(twice, "fidelity")

    def test_buffer(self):
        plan = case("buffer")
        at = find(plan, 0, WriteBuffer)
        assert "never executed" in texts(drop(plan, 0, at), "fidelity")
        assert "store buffer" in texts(edit(plan, 0, at, name="other"), "fidelity")

    def test_peer_of_another_replica(self):
        plan = case("1f1b × dp")
        send = find(plan, 0, Send)
        assert plan.devices[0].instructions[send].receiver == 2
        name = "p2p:0>3"
        communicators = (*plan.communicators, CommunicatorInfo(name, (0, 3)))
        spoiled = edit(plan, 0, send, receiver=3, communicator=name)
        spoiled = replace(spoiled, communicators=communicators)
        assert "receiver 2, found 3" in texts(spoiled, "fidelity")

    def test_message_shape(self):
        plan = case("1f1b")
        message = Message((1, 3), "float64")
        spoiled = edit(plan, 0, find(plan, 0, Send), message=message)
        assert "message" in texts(spoiled, "fidelity")

    def test_average_instead_of_sum(self):
        plan = case("dp")
        for device in (0, 1):
            plan = edit(plan, device, find(plan, device, AllReduceBucket), average=True)
        assert "average False, found True" in texts(plan, "fidelity")

    def test_sum_adds_one_contribution_twice(self):
        plan = case("1f1b")
        at = find(plan, 0, Accumulate, 1)
        before = plan.devices[0].instructions[find(plan, 0, Accumulate, 0)]
        spoiled = edit(plan, 0, at, right=before.right)
        assert "was added before" in texts(spoiled, "fidelity")
        assert "is never added" in texts(spoiled, "fidelity")

    def test_update_of_the_wrong_parameter(self):
        plan = case("interleaved")
        one, two = find(plan, 0, OptimizerStep, 0), find(plan, 0, OptimizerStep, 1)
        first, second = (plan.devices[0].instructions[i] for i in (one, two))
        assert isinstance(first, OptimizerStep)
        assert isinstance(second, OptimizerStep)
        spoiled = edit(plan, 0, one, parameters=second.parameters)
        assert "expected the slot of parameter" in texts(spoiled, "fidelity")
        spoiled = edit(plan, 0, one, gradients=second.gradients)
        assert "reads" in texts(spoiled, "fidelity")

    def test_scale_is_forgotten(self):
        plan = case("weighted")
        spoiled = edit(plan, 0, find(plan, 0, OptimizerStep), scale=None)
        assert "expected a scale" in texts(spoiled, "fidelity")


class TestMatching:
    def test_swapped_sends_carry_each_others_values(self):
        plan = case("1f1b")
        one, two = find(plan, 0, Send, 0), find(plan, 0, Send, 1)
        text = texts(swap(plan, 0, one, two), "matching")
        assert "number 0 on communicator 'p2p:0>1' is not the same on all members" in text
        assert "send" in text
        assert "post_receive" in text

    def test_missing_receive(self):
        plan = case("1f1b")
        plan = drop(plan, 1, find(plan, 1, PostReceive, 3))
        assert "nothing" in texts(plan, "matching")

    def test_collectives_in_different_order(self):
        strategy = [
            Place({"PP": 0}, devices=[0, 1]),
            Place({"PP": 1}, devices=[0, 1]),
            Replicate({}),
        ]
        plan = make(chain(2, 4), strategy)
        verify(plan)
        one, two = find(plan, 1, AllReduceBucket, 0), find(plan, 1, AllReduceBucket, 1)
        assert "matching" in checks(swap(plan, 1, one, two))

    def test_one_communicator_on_two_streams(self):
        plan = case("1f1b")
        at = find(plan, 1, PostReceive, 1)
        text = texts(edit(plan, 1, at, stream=Stream("other")), "matching")
        assert "on several streams" in text


class TestDeadlock:
    def blocked(self):
        """Device 0 waits for the gradient of microbatch 1 before it sends the activation of
        microbatch 1.
        """
        plan = case("1f1b")
        event = plan.devices[0].instructions[find(plan, 0, PostReceive, 1)].record
        send = find(plan, 0, Send, 1)
        wait = Wait(node=NodeId(-1), stream=Stream("compute"), event=event)
        return spoil(plan, 0, lambda program: [*program[:send], wait, *program[send:]])

    def test_cycle_is_shown(self):
        text = texts(self.blocked(), "deadlock")
        assert "2 of 2 devices never finish" in text
        rows = text.splitlines()[2:8]
        assert [row.split()[0] for row in rows] == ["0", "0", "1", "1", "1", "0"]
        assert "wait" in rows[0]
        assert "post_receive" in rows[0]
        assert "meets" in text
        assert "is issued after" in text

    def test_error_names_the_orders(self):
        text = texts(self.blocked(), "deadlock")
        assert "directive 4: Order(" in text

    def test_stream_order_blocks(self):
        """A message waits for the message before it on its stream, not only for its peer."""
        plan = case("skips")
        streams = {plan.devices[0].instructions[find(plan, 0, Send, k)].stream for k in (0, 1)}
        assert streams == {"p2p:0>1", "p2p:0>2"}
        one_stream = self.on_one_stream(plan, streams)
        execution = Execution(check_structure(one_stream)[0])
        execution.run()
        laxer = Execution(check_structure(plan)[0])
        laxer.run()
        assert not laxer.stuck()
        assert [p for p, *_ in laxer.completed] != [p for p, *_ in execution.completed]

    def on_one_stream(self, plan, streams):
        def change(program):
            return [
                replace_struct(x, stream=Stream("both")) if x.stream in streams else x
                for x in program
            ]

        return spoil(plan, 0, change)


class TestRaces:
    def test_every_wait_of_a_compute_stream_is_needed(self):
        """The planner inserts no wait that is not needed, and the detector misses none that is."""
        plan = case("1f1b")
        for device, program in enumerate(plan.devices):
            for i, instruction in enumerate(program.instructions):
                if isinstance(instruction, Wait):
                    text = texts(drop(plan, device, i), "races")
                    assert f"missing wait on device {device}" in text, instruction

    def test_error_names_both_instructions_and_streams(self):
        plan = case("1f1b")
        send = find(plan, 0, Send)
        wait = max(
            i
            for i, instruction in enumerate(plan.devices[0].instructions)
            if isinstance(instruction, Wait) and i < send
        )
        text = texts(drop(plan, 0, wait), "races")
        assert "compute" in text
        assert "p2p:0>1" in text
        assert "writes" in text
        assert "send" in text

    def test_free_before_the_send_has_read(self):
        plan = case("1f1b")
        for device in (0, 1):
            for i, instruction in enumerate(plan.devices[device].instructions):
                if not isinstance(instruction, Free) or not instruction.stream.startswith("p2p"):
                    continue
                moved = edit(plan, device, i, stream=Stream("compute"))
                assert "frees" in texts(moved, "races")
                return
        pytest.fail("no free on a stream of messages")

    def test_wait_on_another_stream_does_not_help(self):
        plan = case("1f1b")
        at = find(plan, 1, Wait)
        spoiled = edit(plan, 1, at, stream=Stream("elsewhere"))
        assert "missing wait" in texts(spoiled, "races")

    def test_broken_order_names_the_directive(self):
        strategy = [
            Place({}, devices=[0]),
            Split({}, num_microbatches=2),
            Order([[{"MB": 1, "PASS": "F"}], [{"MB": 0, "PASS": "F"}]]),
        ]
        plan = make(chain(1, 4), strategy)
        verify(plan)
        one, two = (
            next(
                i
                for i, instruction in enumerate(plan.devices[0].instructions)
                if isinstance(instruction, Compute) and label in describe(plan.dag, instruction)
            )
            for label in ("[F PP=0 MB=1]", "[F PP=0 MB=0]")
        )
        assert one < two
        text = texts(swap(plan, 0, one, two), "races")
        assert "order broken" in text
        assert "directive 2: Order(" in text


class TestLifetime:
    def test_leak(self):
        plan = case("1f1b")
        assert "is never freed" in texts(drop(plan, 0, find(plan, 0, Free)), "lifetime")

    def test_double_free(self):
        plan = case("1f1b")
        at = find(plan, 0, Free)
        twice = spoil(plan, 0, lambda p: [*p[:at], p[at], *p[at:]])
        text = texts(twice, "lifetime")
        assert "frees" in text
        assert "freed" in text

    def test_use_after_free(self):
        plan = case("1f1b")
        at = find(plan, 0, Free)
        reader = max(
            i
            for i, x in enumerate(plan.devices[0].instructions[:at])
            if set(x.reads()) & set(plan.devices[0].instructions[at].frees())
        )
        text = texts(move(plan, 0, at, reader), "lifetime")
        assert "reads" in text
        assert "freed" in text

    def test_read_before_write(self):
        plan = case("1f1b")
        at = find(plan, 0, LoadInput)
        assert "nothing has written yet" in texts(drop(plan, 0, at), "lifetime")

    def test_state_is_not_freed(self):
        plan = case("1f1b")
        at = find(plan, 0, Free)
        state = next(i for i, s in enumerate(plan.devices[0].slots) if s.role == "parameter")
        slots = (*plan.devices[0].instructions[at].slots, Slot(state))
        assert "must survive" in texts(edit(plan, 0, at, slots=slots), "lifetime")

    def test_parameter_read_after_its_update(self):
        plan = case("1f1b")
        at = find(plan, 0, OptimizerStep)
        last = find(plan, 0, Compute, 7)
        text = texts(move(plan, 0, last, at), "lifetime")
        assert "stored the next step's value there" in text


class TestViewsOfState:
    def test_view_read_after_the_update_in_place(self):
        """The update changes a parameter in place, and with it what an earlier chunk handed out as
        a view.
        """
        plan = make(handed_out_view(), [Place({}, devices=[0])])
        program = plan.devices[0].instructions
        update = next(
            i for i, x in enumerate(program) if isinstance(x, OptimizerStep) and x.names == ("w0",)
        )
        late = next(
            i
            for i, x in enumerate(program)
            if isinstance(x, Compute) and "PP=2" in describe(plan.dag, x)
        )
        verify(plan)
        assert late < update
        assert "stored the next step's value" in texts(move(plan, 0, update, late), "lifetime")


class TestContributions:
    """The sums are checked against the DAG's contributions, also where the DAG's own sums are
    wrong.
    """

    def spoil_dag(self, plan, change):
        return replace(plan, dag=replace(plan.dag, nodes=change(dict(plan.dag.nodes))))

    def test_contribution_that_no_sum_has(self):
        plan = case("1f1b")
        contributions = {name: list(vs) for name, vs in plan.dag.contributions.items()}
        contributions["w0"] = contributions["w0"][:-1]
        spoiled = replace(plan, dag=replace(plan.dag, contributions=contributions))
        assert "w0" in texts(spoiled, "contributions")

    def test_missing_all_reduce(self):
        """Without the all-reduce (in plan and DAG alike) each replica would use its own sum
        only.
        """
        plan = case("dp")
        dag = plan.dag
        (reduce,) = [n for n in dag.nodes.values() if n.work.kind == "all_reduce"]
        (update,) = [n for n in dag.nodes.values() if n.work.kind == "update"]
        nodes = {k: n for k, n in dag.nodes.items() if n is not reduce}
        nodes[update.id] = replace_struct(update, inputs=reduce.inputs)
        spoiled = replace(plan, dag=replace(dag, nodes=nodes), communicators=())

        def without(program):
            kept = []
            (collective,) = [i for i in program if isinstance(i, AllReduceBucket)]
            for instruction in program:
                if isinstance(instruction, AllReduceBucket | Wait):
                    continue
                if isinstance(instruction, Free):
                    continue
                if isinstance(instruction, OptimizerStep):
                    kept.append(replace_struct(instruction, gradients=collective.inputs))
                    continue
                kept.append(instruction)
            return kept + [
                Free(node=NodeId(-1), stream=Stream("compute"), slots=i.frees())
                for i in program
                if isinstance(i, Free) and not set(i.frees()) & set(collective.outputs)
            ]

        for device in (0, 1):
            spoiled = spoil(spoiled, device, without)
        text = texts(spoiled, "contributions")
        assert checks(spoiled) == {"contributions"}
        assert text.count("missing") == 2 * 4, "on each replica, the other's four microbatches"

    @pytest.mark.parametrize("zero", [1, 2, 3])
    @pytest.mark.parametrize(
        ("groups", "missing"),
        [
            (((0, 2), (1, 3), (4, 6), (5, 7)), 4),  # slice by slice, but each stage by itself
            (((0, 4), (1, 5), (2, 6), (3, 7)), 4),  # over the stages, but each pair by itself
        ],
    )
    def test_slices_that_are_not_added_up_over_all_who_hold_them(self, zero, groups, missing):
        plan = case(f"hybrid stages, zero {zero}, tied")
        whole, nodes = ((0, 2, 4, 6), (1, 3, 5, 7)), {}
        for node in plan.dag.nodes.values():
            if node.work.kind == "all_reduce" and {*map(frozenset, node.groups)} == {
                *map(frozenset, whole)
            }:
                nodes[node.id] = replace_struct(node, groups=groups)
        assert nodes, "the tied parameter's slices are reduced over both stages"
        dag = replace(plan.dag, nodes={**plan.dag.nodes, **nodes})
        text = texts(make_plan(dag), "contributions")
        assert "should be the gradient of 'w0', but" in text
        assert text.count("missing") >= missing

    def test_update_twice(self):
        plan = case("1f1b")
        at = find(plan, 0, OptimizerStep)
        twice = spoil(plan, 0, lambda p: [*p[:at], p[at], *p[at:]])
        assert {"fidelity", "lifetime"} <= checks(twice)


def test_problems_are_bounded():
    """One mistake with many consequences does not bury the reader."""
    plan = case("1f1b deep")
    empty = spoil(plan, 0, lambda _: [])
    assert 0 < len(find_problems(empty)) <= 30


def test_pipeline_with_fewer_microbatches_than_stages():
    verify(make(chain(4, 16), pipeline(4, microbatches=2)))
