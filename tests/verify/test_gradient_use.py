"""Clipping and keeping gradients: DAGs that ask for the wrong thing, and plans that do it."""

import dataclasses

import pytest
from msgspec.structs import replace as replace_struct
from tests.verify.dags import chain
from tests.verify.plans import ROWS, checks, edit, find, pipeline, texts

from piper.directives.strategy import apply
from piper.ir.dag import Clip, Dag, GradientUse, Role
from piper.ir.derive import derive
from piper.ir.edit import use_gradients
from piper.ops.all_reduce import AllReduce
from piper.ops.base import ReduceOp
from piper.ops.grad_norm import CombineParts, FinishNorm, MeasureGradients, Norm, NormPart, NormSum
from piper.ops.keep import AddKept, AddKeptGradients, Keep, KeepGradients
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.plan.codec import decode_plan, encode_plan
from piper.planner import plan
from piper.verify import verify


def dag_of(
    use: GradientUse = GradientUse.UPDATE, norm: Norm | None = Norm.L2, max_norm=1.0, **options
) -> Dag:
    """Two stages on two replicas each; ``level`` is the flag of what is sharded."""
    level = options.pop("level", None)
    flags = {} if level is None else {level: True}
    strategy = pipeline(2, replicas=2, microbatches=2, bucket_size=1e-5, **flags)
    dag = apply(chain(2, ROWS, **options), strategy)
    clip = None if norm is None else Clip(norm, max_norm)
    return derive(use_gradients(dag, use, clip).dag)


def change(dag: Dag, kind: type, count: int = 0, **fields) -> Dag:
    """*dag* with fields of node number *count* of a kind of work changed; a function makes one of the old value."""
    node = [n for n in dag.nodes.values() if isinstance(n.work, kind)][count]
    new = {n: f(getattr(node, n)) if callable(f) else f for n, f in fields.items()}
    return dataclasses.replace(dag, nodes={**dag.nodes, node.id: replace_struct(node, **new)})


LEVELS = [None, "shard_optimizer", "shard_grads", "shard_params"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("use", list(GradientUse))
@pytest.mark.parametrize("weighted", [False, True])
def test_correct_plans_pass_and_survive_their_files(level, use, weighted):
    for norm, max_norm in ((None, None), (Norm.L2, 1.0), (Norm.INF, 1.0), (Norm.L2, None)):
        dag = dag_of(use, norm, max_norm, level=level, weighted=weighted, tied=weighted)
        planned = plan(dag)
        verify(planned)
        assert decode_plan(encode_plan(planned)) == planned
        kinds = {type(i) for d in planned.devices for i in d.instructions}
        assert (KeepGradients in kinds) == (use is GradientUse.KEEP)
        assert (OptimizerStep in kinds) == (use is not GradientUse.KEEP)
        assert (AddKeptGradients in kinds) == (use is GradientUse.ADD)
        assert (FinishNorm in kinds) == (norm is not None and use is not GradientUse.KEEP)


def test_the_norm_is_reported_once():
    reports = [
        (d.device, i.microbatch)
        for d in plan(dag_of()).devices
        for i in d.instructions
        if isinstance(i, Report) and i.name == "grad_norm"
    ]
    assert reports == [(0, 0)]


def test_a_change_of_use_leaves_nothing_behind():
    dag = dag_of(GradientUse.ADD, weighted=True)
    back = derive(use_gradients(dag, GradientUse.UPDATE, None).dag)
    plain = dag_of(norm=None, weighted=True)
    assert [n.work for n in back.nodes.values()] == [n.work for n in plain.nodes.values()]
    assert not [s for d in plan(back).devices for s in d.slots if s.role is Role.KEPT]


# --- plans that differ from their DAG -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (OptimizerStep, {"max_norm": 2.0}, "expected max_norm 1.0, found 2.0"),
        (OptimizerStep, {"max_norm": None, "grad_norm": None}, "expected a norm"),
        (MeasureGradients, {"norm": Norm.INF}, "expected norm"),
        (MeasureGradients, {"gradients": ()}, "reads 0 values, expected 1"),
        (CombineParts, {"norm": Norm.INF}, "expected norm"),
        (CombineParts, {"parts": ()}, "reads 0 values, expected 1"),
        (FinishNorm, {"norm": Norm.INF}, "expected norm"),
    ],
)
def test_an_instruction_that_is_not_the_nodes(kind, fields, message):
    planned = plan(dag_of())
    assert message in texts(edit(planned, 0, find(planned, 0, kind), **fields), "fidelity")


def test_an_update_that_clips_by_a_part():
    planned = plan(dag_of())
    part = planned.devices[1].instructions[find(planned, 1, FinishNorm)].part
    spoiled = edit(planned, 1, find(planned, 1, OptimizerStep), grad_norm=part)
    assert "expected norm grad_norm" in texts(spoiled, "fidelity")


@pytest.mark.parametrize("use", [GradientUse.KEEP, GradientUse.ADD])
def test_gradients_kept_in_the_wrong_place(use):
    kind = KeepGradients if use is GradientUse.KEEP else AddKeptGradients
    planned = plan(dag_of(use, weighted=True, tied=True, level="shard_grads"))
    at = find(planned, 0, kind)
    kept = planned.devices[0].instructions[at].kept
    other = next(s for s, i in enumerate(planned.devices[0].slots) if i.role is Role.TOTAL)
    assert "expected kept" in texts(edit(planned, 0, at, kept=(other,) * len(kept)), "fidelity")
    assert "fidelity" in checks(edit(planned, 0, at, scale=None))


# --- DAGs that are wrong in themselves, with plans that follow them -------------------------------------


def wrong(dag: Dag) -> str:
    return texts(plan(dag), "contributions")


def test_a_replica_that_counts_too(monkeypatch):
    from piper.ir.derive.updates import _Bucket

    monkeypatch.setattr(_Bucket, "owners", lambda bucket: bucket.use.holders[0])
    assert "the norm counts 'w0' 2 times instead of 1" in wrong(dag_of())


def test_slices_that_do_not_count(monkeypatch):
    from piper.ir.derive.updates import _Bucket

    monkeypatch.setattr(_Bucket, "owners", lambda bucket: bucket.use.holders[0][:1])
    text = wrong(dag_of(level="shard_grads"))
    assert "the norm counts 'w0' slice 1 0 times instead of 1" in text


def test_a_stage_that_clips_by_its_own_norm():
    dag = dag_of()
    (reduced,) = [
        n for n in dag.nodes.values() if n.outputs == dag.nodes[dag.grad_norm and _root(dag)].inputs
    ]
    own = replace_struct(reduced, groups=((0, 1), (2, 3)))
    assert "the norm counts 'w1' 0 times instead of 1" in wrong(
        dataclasses.replace(dag, nodes={**dag.nodes, own.id: own})
    )


def _root(dag: Dag):
    return dag.producers[dag.grad_norm[0]]


@pytest.mark.parametrize(
    ("norm", "fields"),
    [
        (Norm.INF, {"reduce": ReduceOp.SUM}),
        (Norm.L2, {"reduce": ReduceOp.MAX}),
        (Norm.L2, {"average": True}),
    ],
)
def test_parts_that_are_combined_wrongly(norm, fields):
    dag = dag_of(norm=norm)
    (comm,) = [n for n in dag.nodes.values() if n.outputs == dag.nodes[_root(dag)].inputs]
    work = replace_struct(AllReduce(reduce=norm.combines), **fields)
    spoiled = {**dag.nodes, comm.id: replace_struct(comm, work=work)}
    text = wrong(dataclasses.replace(dag, nodes=spoiled))
    assert "does not combine one part of the norm of each member" in text


def test_a_part_that_is_left_out():
    text = wrong(change(dag_of(), NormSum, inputs=()))
    assert "the norm counts 'w0' 0 times instead of 1" in text


def test_an_update_without_clipping():
    dag = change(
        dag_of(),
        Update,
        work=lambda w: replace_struct(w, max_norm=None),
        inputs=lambda values: values[:-1],
    )
    assert "clips to None, asked for is 1.0" in wrong(dag)


def test_a_norm_of_sums_that_are_not_divided():
    spoiled = change(
        dag_of(weighted=True),
        NormPart,
        work=lambda w: replace_struct(w, scaled=False),
        inputs=lambda values: values[:1],
    )
    assert "must be divided by the total loss weight exactly once" in wrong(spoiled)


@pytest.mark.parametrize("kind", [NormPart, Update])
def test_gradients_that_lack_what_was_kept(kind):
    dag = dag_of(GradientUse.ADD)
    (added,) = [n for n in dag.nodes.values() if isinstance(n.work, AddKept)][:1]
    reader = next(
        n for n in dag.nodes.values() if isinstance(n.work, kind) and added.outputs[0] in n.inputs
    )
    inputs = tuple(added.inputs[0] if v == added.outputs[0] else v for v in reader.inputs)
    nodes = {**dag.nodes, reader.id: replace_struct(reader, inputs=inputs)}
    text = wrong(dataclasses.replace(dag, nodes=nodes))
    assert "what was kept from earlier steps is not in the gradients" in text


def test_gradients_that_nobody_keeps():
    dag = dag_of(GradientUse.KEEP, norm=None)
    keep = next(n for n in dag.nodes.values() if isinstance(n.work, Keep))
    nodes = {i: n for i, n in dag.nodes.items() if i != keep.id}
    text = wrong(dataclasses.replace(dag, nodes=nodes))
    assert "its gradient is never kept" in text


def test_a_step_that_keeps_and_updates():
    dag = dataclasses.replace(dag_of(norm=None), gradient_use=GradientUse.KEEP)
    assert "nothing is updated in a step that keeps its gradients" in wrong(dag)
