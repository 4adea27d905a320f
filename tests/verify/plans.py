"""Plans to verify, and ways to spoil them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec.structs import replace as replace_struct
from tests.verify.dags import chain, handed_out_view

from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import Strategy, apply
from piper.ir.dag import Clip, Dag, GradientUse
from piper.ir.edit import use_gradients
from piper.ops.base import Instruction
from piper.ops.grad_norm import Norm
from piper.plan.model import Plan
from piper.planner import plan as make_plan
from piper.schedules.interleaved import interleaved_one_f_one_b
from piper.schedules.one_f_one_b import one_f_one_b
from piper.schedules.placements import chain as chained
from piper.schedules.placements import looped, two_way
from piper.verify import find_problems

ROWS = 16


def pipeline(stages: int, *, replicas: int = 1, microbatches: int = 4, **replicate) -> Strategy:
    """1F1B over *stages* groups of *replicas* devices."""
    groups = [[s * replicas + r for r in range(replicas)] for s in range(stages)]
    strategy = [*chained(groups), Split({}, num_microbatches=microbatches)]
    if replicas > 1:
        strategy.insert(0, Replicate({}, **replicate))
    return [*strategy, *one_f_one_b(stages, microbatches)]


def interleaved(ranks: int, virtual: int, microbatches: int) -> Strategy:
    return [
        *looped([[r] for r in range(ranks)], virtual),
        Split({}, num_microbatches=microbatches),
        *interleaved_one_f_one_b(ranks, virtual, microbatches),
    ]


def hybrid(microbatches: int = 2, **shard) -> Strategy:
    """Four replicas: sharded within pairs, replicated across."""
    return [
        Replicate({}, [[0, 1], [2, 3]], **shard),
        Split({}, num_microbatches=microbatches),
    ]


def hybrid_stages(microbatches: int = 2, **shard) -> Strategy:
    """Two stages of four replicas, sharded within pairs, replicated across; one directive for
    all.
    """
    return [
        *chained([[0, 1, 2, 3], [4, 5, 6, 7]]),
        Replicate({}, [[0, 1], [2, 3], [4, 5], [6, 7]], **shard),
        Split({}, num_microbatches=microbatches),
        *one_f_one_b(2, microbatches),
    ]


def together(**shard) -> Strategy:
    """All on the same two replicas."""
    return [Place({}, [0, 1]), Replicate({}, bucket_size=1e-6, **shard)]


def looped_zero(virtual: int, microbatches: int, **shard) -> Strategy:
    """Two ranks of two replicas; consecutive chunks of a device are of different stages, or of one
    that is gathered already.
    """
    return [
        *looped([[0, 1], [2, 3]], virtual),
        Replicate({}, **shard),
        Split({}, num_microbatches=microbatches),
        *interleaved_one_f_one_b(2, virtual, microbatches),
    ]


def both_ways(ranks: int, microbatches: int, replicas: int = 1, **replicate) -> Strategy:
    groups = [[s * replicas + r for r in range(replicas)] for s in range(ranks)]
    strategy = [Split({}, num_microbatches=microbatches), *two_way(groups, microbatches)]
    return [Replicate({}, **replicate), *strategy] if replicas > 1 else strategy


def clipped(dag: Dag, norm: Norm) -> Dag:
    """*dag*, its gradients clipped."""
    return use_gradients(dag, GradientUse.UPDATE, Clip(norm, 1.5)).dag


CASES: dict[str, Callable[[], tuple[Dag, Strategy]]] = {
    "1f1b": lambda: (chain(2, ROWS), pipeline(2)),
    "1f1b deep": lambda: (chain(4, ROWS, skip=True), pipeline(4, microbatches=8)),
    "1f1b × dp": lambda: (chain(2, ROWS), pipeline(2, replicas=2)),
    "dp": lambda: (chain(1, ROWS), pipeline(1, replicas=2)),
    "interleaved": lambda: (chain(4, ROWS), interleaved(2, 2, 4)),
    "tied": lambda: (chain(3, ROWS, tied=True), pipeline(3)),
    "tied × dp": lambda: (chain(2, ROWS, tied=True), pipeline(2, replicas=2)),
    "skips": lambda: (chain(4, ROWS, skip=True), pipeline(4)),
    "weighted": lambda: (chain(3, ROWS, weighted=True), pipeline(3)),
    "weighted × dp": lambda: (chain(2, ROWS, weighted=True), pipeline(2, replicas=2)),
    "buckets": lambda: (chain(3, ROWS), pipeline(3, replicas=2, bucket_size=1e-5)),
    "buffer": lambda: (chain(2, ROWS, buffer=True), pipeline(2)),
    "buffer × dp": lambda: (
        chain(2, ROWS, buffer=True),
        pipeline(2, replicas=2, replicated_buffers="first"),
    ),
    "two ways": lambda: (chain(2, ROWS, tied=True, weighted=True), both_ways(2, 4)),
    "two ways × dp": lambda: (chain(2, ROWS), both_ways(2, 4, replicas=2)),
    "clipped": lambda: (clipped(chain(3, ROWS), Norm.L2), pipeline(3)),
    "clipped × dp": lambda: (
        clipped(chain(2, ROWS, tied=True, weighted=True), Norm.INF),
        pipeline(2, replicas=2, bucket_size=1e-5),
    ),
    "handed-out view": lambda: (handed_out_view(), [Place({}, [0])]),
    "handed-out view, zero 1": lambda: (handed_out_view(), together(shard_optimizer=True)),
    "handed-out view, zero 3": lambda: (handed_out_view(), together(shard_params=True)),
    "zero 1": lambda: (
        chain(2, ROWS),
        pipeline(2, replicas=2, microbatches=2, shard_optimizer=True),
    ),
    "zero 2": lambda: (chain(2, ROWS), pipeline(2, replicas=2, shard_grads=True)),
    "zero 3": lambda: (chain(2, ROWS), pipeline(2, replicas=2, shard_params=True)),
    "zero 1, tied, weighted": lambda: (
        chain(3, ROWS, tied=True, weighted=True),
        pipeline(3, replicas=2, microbatches=2, shard_optimizer=True),
    ),
    "zero 3, tied, weighted": lambda: (
        chain(3, ROWS, tied=True, weighted=True),
        pipeline(3, replicas=2, microbatches=2, shard_params=True),
    ),
    "zero 3, empty slices": lambda: (
        chain(1, 2 * 16),
        pipeline(1, replicas=16, microbatches=1, shard_params=True),
    ),
    "hybrid zero 1": lambda: (chain(2, ROWS), hybrid(shard_optimizer=True)),
    "hybrid zero 2": lambda: (chain(2, ROWS), hybrid(shard_grads=True)),
    "hybrid zero 3": lambda: (chain(2, ROWS), hybrid(shard_params=True)),
    "hybrid stages, zero 1, tied": lambda: (
        chain(2, ROWS, tied=True),
        hybrid_stages(shard_optimizer=True),
    ),
    "hybrid stages, zero 2, tied": lambda: (
        chain(2, ROWS, tied=True),
        hybrid_stages(shard_grads=True),
    ),
    "hybrid stages, zero 3, tied": lambda: (
        chain(2, ROWS, tied=True),
        hybrid_stages(shard_params=True),
    ),
    "two ways, zero 2": lambda: (
        chain(2, ROWS, tied=True),
        both_ways(2, 2, replicas=2, shard_grads=True),
    ),
    "looped, zero 3": lambda: (chain(4, ROWS), looped_zero(2, 2, shard_params=True)),
    "looped, unordered": lambda: (
        chain(4, ROWS, skip=True),
        [*looped([[0], [1]], 2), Split({}, num_microbatches=4)],
    ),
}


def make(dag: Dag, strategy: Strategy) -> Plan:
    """Apply and plan."""
    return make_plan(apply(dag, strategy))


def case(name: str) -> Plan:
    """The plan of one of :data:`CASES`."""
    return make(*CASES[name]())


Program = list[Instruction]


def spoil(plan: Plan, device: int, change: Callable[[Program], Sequence[Instruction]]) -> Plan:
    """*plan* with *device*'s instructions changed."""
    devices = list(plan.devices)
    instructions = tuple(change(list(devices[device].instructions)))
    devices[device] = replace_struct(devices[device], instructions=instructions)
    return replace(plan, devices=tuple(devices))


def edit(plan: Plan, device: int, position: int, **fields: object) -> Plan:
    """*plan* with fields of one instruction changed."""

    def change(program: Program) -> Program:
        program[position] = replace_struct(program[position], **fields)
        return program

    return spoil(plan, device, change)


def drop(plan: Plan, device: int, position: int) -> Plan:
    return spoil(plan, device, lambda program: program[:position] + program[position + 1 :])


def move(plan: Plan, device: int, position: int, to: int) -> Plan:
    def change(program: Program) -> Program:
        program.insert(to, program.pop(position))
        return program

    return spoil(plan, device, change)


def swap(plan: Plan, device: int, one: int, two: int) -> Plan:
    def change(program: Program) -> Program:
        program[one], program[two] = program[two], program[one]
        return program

    return spoil(plan, device, change)


def find(plan: Plan, device: int, kind: type[Instruction], count: int = 0) -> int:
    """The position of *device*'s instruction number *count* of a kind."""
    program = plan.devices[device].instructions
    return [i for i, instruction in enumerate(program) if type(instruction) is kind][count]


def checks(plan: Plan) -> set[str]:
    """The names of the checks that find something."""
    return {problem.check for problem in find_problems(plan)}


def texts(plan: Plan, check: str) -> str:
    """All that one check finds."""
    return "\n".join(p.text for p in find_problems(plan) if p.check == check)
