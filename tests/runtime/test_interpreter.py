"""The interpreter: order within streams, errors, what a step leaves behind, what it costs."""

import time
import weakref
from dataclasses import replace

import pytest
import torch
from tests.backends import plans
from torch.utils._python_dispatch import TorchDispatchMode

from piper.devices.cpu import CpuDevice
from piper.devices.memory import Hub
from piper.dtypes import DType
from piper.errors import AbortedError, CommunicationError, RunError
from piper.ids import COMPUTE, DeviceId, EventId, NodeId, Slot, Stream, ValueId
from piper.ir.body import Body, Call, Ref, TensorSpec, body_id
from piper.ir.dag import Role
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.base import Instruction, Message
from piper.ops.compute import Compute
from piper.ops.free import Free
from piper.ops.p2p import PostReceive, Send
from piper.ops.report import Report
from piper.plan.model import DevicePlan, SlotInfo
from piper.runtime.context import Context
from piper.runtime.interpreter import Program
from piper.runtime.state import ModelState

SPEC = TensorSpec((4,), DType.FLOAT64)
MESSAGE = Message((4,), "float64")
ADD = Body((SPEC,), (Call("aten.add.Tensor", (Ref(0), 1.0), (), (SPEC,)),), (1,))
SUM = Body(
    (SPEC,), (Call("aten.sum.default", (Ref(0),), (), (TensorSpec((), DType.FLOAT64),)),), (1,)
)
COPY = Body((SPEC,), (), (0,))
BODIES = {body_id(b): b for b in (ADD, SUM, COPY)}
COMM = Stream("comm")


def program(
    instructions: list[Instruction],
    num_slots: int,
    *,
    hub: Hub | None = None,
    members: tuple[int, ...] = (0,),
) -> tuple[Program, Context]:
    """Slot 0 holds the buffer ``x`` (zeros); the others start empty."""
    template = plans.pipeline()
    slots = [SlotInfo(ValueId(0), Role.BUFFER, "x", MESSAGE)]
    slots += [SlotInfo(ValueId(i), Role.ACTIVATION, "", MESSAGE) for i in range(1, num_slots)]
    plan = replace(template, dag=replace(template.dag, bodies=BODIES))
    cpu = CpuDevice()
    context = Context(plan, cpu.torch_device)
    ids = tuple(DeviceId(i) for i in members)
    end = (hub or Hub(timeout=5)).communicator("c", ids, DeviceId(0))
    buffers = {"x": torch.zeros(4, dtype=torch.float64)}
    made = Program(
        plan=plan,
        mine=DevicePlan(DeviceId(0), tuple(slots), tuple(instructions)),
        device=cpu,
        state=ModelState({}, buffers, {}, None, cpu.torch_device),
        context=context,
        communicators={"c": end},
        constants={},
    )
    return made, context


def compute(body: Body, source: int, target: int, stream: str = COMPUTE, node: int = -1) -> Compute:
    return Compute(
        node=NodeId(node),
        stream=Stream(stream),
        body=body_id(body),
        inputs=(Slot(source),),
        outputs=(Slot(target),),
        microbatch=0,
    )


def free(*slots: int, stream: str = COMPUTE) -> Free:
    return Free(node=NodeId(-1), stream=Stream(stream), slots=tuple(Slot(s) for s in slots))


def all_reduce(source: int, target: int) -> AllReduceBucket:
    return AllReduceBucket(
        node=NodeId(-1),
        stream=COMM,
        communicator="c",
        members=(DeviceId(0),),
        inputs=(Slot(source),),
        outputs=(Slot(target),),
        messages=(MESSAGE,),
    )


def report(slot: int, stream: str = COMPUTE) -> Report:
    return Report(
        node=NodeId(-1), stream=Stream(stream), name="loss", slot=Slot(slot), microbatch=3
    )


def test_a_step_may_be_run_again_and_again():
    made, context = program(
        [compute(ADD, 0, 1), compute(SUM, 1, 2), report(2), free(1), free(2)], num_slots=3
    )
    for _ in range(3):
        made.run()
        assert context.take() == {"loss": {3: 4.0}}


def test_work_on_one_stream_sees_what_communication_before_it_wrote():
    # two collectives, then compute, one after the other on the communication's own stream: no wait
    # in the plan
    hub = Hub(timeout=5, delay=0.05, poison=True)
    made, context = program(
        [
            compute(ADD, 0, 1),
            all_reduce(1, 2),
            all_reduce(2, 3),
            compute(SUM, 3, 4, stream=COMM),
            report(4, stream=COMM),
            free(1, 2, 3, 4, stream=COMM),
        ],
        num_slots=5,
        hub=hub,
    )
    made.run()
    assert context.take() == {"loss": {3: 4.0}}


def test_freeing_a_slot_that_is_still_being_written_waits_for_it():
    made, _ = program([compute(ADD, 0, 1), all_reduce(1, 2), free(2, stream=COMM), free(1)], 3)
    made.run()


def test_tensors_left_behind_are_a_bug_of_the_plan():
    made, _ = program([compute(ADD, 0, 1)], num_slots=2)
    with pytest.raises(AssertionError, match=r"device 0: slots \[1\] are not empty"):
        made.run()


def test_what_an_instruction_raises_names_device_node_microbatch_and_instruction():
    made, _ = program([compute(ADD, 0, 1), compute(SUM, 5, 2, node=3)], num_slots=6)
    with pytest.raises(RunError) as caught:
        made.run()
    text = str(caught.value)
    assert text.startswith("device 0, node B PP=0 MB=1, microbatch 0, instruction `compute %2 =")
    assert "read of an empty slot" in text
    assert "Traceback" in text
    assert isinstance(caught.value.__cause__, AssertionError)
    assert type(caught.value) is RunError


@pytest.mark.parametrize("kind", [CommunicationError, AbortedError])
def test_consequences_of_other_failures_keep_their_class(kind):
    hub = Hub(timeout=0.2)
    made, _ = program([receive(1), free(1, stream=COMM)], 2, hub=hub, members=(1, 0))
    if kind is AbortedError:
        hub.abort("device 9 failed")
    with pytest.raises(kind, match=r"device 0.*instruction") as caught:
        made.run()
    assert type(caught.value) is kind


def receive(slot: int, event: int | None = None) -> PostReceive:
    return PostReceive(
        node=NodeId(-1),
        stream=COMM,
        communicator="c",
        sender=DeviceId(1),
        receiver=DeviceId(0),
        message=MESSAGE,
        slot=Slot(slot),
        record=None if event is None else EventId(event),
    )


def test_what_is_in_flight_at_the_end_is_waited_for():
    hub = Hub(timeout=0.3)
    send = Send(
        node=NodeId(-1),
        stream=COMM,
        communicator="c",
        sender=DeviceId(0),
        receiver=DeviceId(1),
        message=MESSAGE,
        slot=Slot(1),
    )
    made, _ = program([compute(ADD, 0, 1), send, free(1)], num_slots=2, hub=hub, members=(0, 1))
    with pytest.raises(CommunicationError, match=r"device 0, at the end of the step: .*send to"):
        made.run()


def test_inputs_are_given_up_during_the_last_chunk_that_reads_them():
    # two adds of slot 1 in one body; what holds slot 1 is watched when the second runs
    twice = Body(
        (SPEC,),
        (
            Call("aten.add.Tensor", (Ref(0), 1.0), (), (SPEC,)),
            Call("aten.add.Tensor", (Ref(1), 1.0), (), (SPEC,)),
            Call("aten.sum.default", (Ref(2),), (), (TensorSpec((), DType.FLOAT64),)),
        ),
        (3,),
    )
    BODIES[body_id(twice)] = twice
    watched: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if watched:
                alive.append(watched[0]() is not None)
            result = func(*args, **(kwargs or {}))
            if not watched:
                watched.append(weakref.ref(result))
            return result

    made, context = program(
        [compute(ADD, 0, 1), compute(twice, 1, 2), free(1), report(2), free(2)], num_slots=3
    )
    with Watch():
        made.run()
    assert alive[:3] == [True, False, False]
    assert context.take() == {"loss": {3: 12.0}}


@pytest.mark.parametrize("body", [COPY, ADD])
def test_cost_of_an_instruction(body, capsys):
    count = 1000
    instructions: list[Instruction] = []
    for i in range(count):
        instructions += [compute(body, i, i + 1), *([free(i)] if i else [])]
    made, _ = program([*instructions, free(count)], num_slots=count + 1)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        made.run()
        seconds.append(time.perf_counter() - began)
    name = "no operator" if body is COPY else "one operator"
    with capsys.disabled():
        print(f"\ncompute with {name} + free: {min(seconds) / count * 1e6:.2f} µs")  # noqa: T201 (a figure to read, not to assert)
