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
from piper.ops.accumulate import Sum
from piper.ops.all_reduce import AllReduce, AllReduceBucket
from piper.ops.base import ReduceOp
from piper.ops.grad_norm import CombineParts, FinishNorm, MeasureGradients, Norm, NormPart, NormSum
from piper.ops.keep import AddKept, AddKeptGradients, Keep, KeepGradients
from piper.ops.reduce_scatter import ReduceScatter
from piper.ops.report import Report
from piper.ops.update import OptimizerStep, Update
from piper.plan.codec import decode_plan, encode_plan
from piper.planner import plan
from piper.verify import find_problems, verify


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
    """*dag* with fields of node number *count* of a kind of work changed; a function makes one of
    the old value.
    """
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


# --- what a step keeps, and what the next one adds ------------------------------------------------------


def of_kind(dag: Dag, kind: type, count: int = 0):
    """Node number *count* of a kind of work."""
    return [n for n in dag.nodes.values() if isinstance(n.work, kind)][count]


def reading(dag: Dag, node, **instead) -> Dag:
    """*dag* with *node* reading other values: ``instead`` maps ``v<id>`` to them."""
    inputs = tuple(instead.get(f"v{v}", v) for v in node.inputs)
    return dataclasses.replace(
        dag, nodes={**dag.nodes, node.id: replace_struct(node, inputs=inputs)}
    )


def again(dag: Dag, node, inputs) -> tuple[Dag, tuple]:
    """*dag* with another node like *node* that reads *inputs*, and what it makes."""
    first = max(dag.values) + 1
    outputs = tuple(range(first, first + len(node.outputs)))
    values = {
        new: replace_struct(dag.values[old], id=new)
        for new, old in zip(outputs, node.outputs, strict=True)
    }
    copy = replace_struct(node, id=max(dag.nodes) + 1, inputs=inputs, outputs=outputs)
    nodes = {**dag.nodes, copy.id: copy}
    return dataclasses.replace(dag, nodes=nodes, values={**dag.values, **values}), outputs


def one_bucket(use: GradientUse, *, weighted: bool = False, **options) -> Dag:
    """One stage on two replicas, one parameter, one bucket."""
    strategy = pipeline(1, replicas=2, microbatches=2, **options)
    dag = apply(chain(1, ROWS, weighted=weighted), strategy)
    return derive(use_gradients(dag, use, None).dag)


def without(dag: Dag, *kinds: type) -> Dag:
    """*dag* without the nodes of some kinds of work."""
    nodes = {i: n for i, n in dag.nodes.items() if not isinstance(n.work, kinds)}
    return dataclasses.replace(dag, nodes=nodes)


def sums_of(node) -> tuple:
    """The sums that a node keeps, or adds to what is kept."""
    return node.inputs[: len(node.work.parameters)]


def renamed(found, wanted) -> dict:
    return {f"v{a}": b for a, b in zip(found, wanted, strict=True)}


def refusals(dag: Dag) -> str:
    """All that is wrong with its plan."""
    return "\n".join(p.text for p in find_problems(plan(dag)))


REDUCES = {None: AllReduce, "shard_optimizer": ReduceScatter}


@pytest.mark.parametrize("level", REDUCES)
def test_only_the_updating_step_reduces(level):
    flags = {} if level is None else {level: True}
    kind = REDUCES[level]
    for use in GradientUse:
        dag = one_bucket(use, **flags)
        count = sum(isinstance(n.work, kind) for n in dag.nodes.values())
        assert count == (use is not GradientUse.KEEP)
        verify(plan(dag))


@pytest.mark.parametrize("level", REDUCES)
def test_what_was_kept_is_left_out(level):
    dag = one_bucket(GradientUse.ADD, **({} if level is None else {level: True}))
    added, reduction = of_kind(dag, AddKept), of_kind(dag, REDUCES[level])
    text = wrong(reading(dag, reduction, **renamed(added.outputs, sums_of(added))))
    assert "what was kept from earlier steps is not in the gradients" in text
    assert "missing: what device 0 kept" in text
    assert "missing: what device 1 kept" in text


def test_what_one_device_kept_is_left_out():
    planned = plan(one_bucket(GradientUse.ADD))
    added = planned.devices[1].instructions[find(planned, 1, AddKeptGradients)]
    at = find(planned, 1, AllReduceBucket)
    assert "expected total w0" in texts(edit(planned, 1, at, inputs=added.gradients), "fidelity")


def test_what_was_kept_is_added_twice():
    dag = one_bucket(GradientUse.ADD)
    added, reduction = of_kind(dag, AddKept), of_kind(dag, AllReduce)
    count = len(added.outputs)
    dag, twice = again(dag, added, (*added.outputs, *added.inputs[count:]))
    text = refusals(reading(dag, reduction, **renamed(added.outputs, twice)))
    assert "stored the next step's value there" in text


def test_nothing_is_reduced():
    """Each device would update from its own gradients of all steps."""
    dag = one_bucket(GradientUse.ADD)
    reduction, update = of_kind(dag, AllReduce), of_kind(dag, Update)
    text = wrong(reading(dag, update, **renamed(reduction.outputs, reduction.inputs)))
    assert "missing: what device 1 kept" in text
    assert "missing: contribution" in text


def test_the_sum_is_reduced_twice():
    dag = one_bucket(GradientUse.ADD)
    reduction, update = of_kind(dag, AllReduce), of_kind(dag, Update)
    dag, twice = again(dag, reduction, reduction.outputs)
    text = wrong(reading(dag, update, **renamed(reduction.outputs, twice)))
    assert "2 times: what device 0 kept" in text
    assert "2 times: contribution" in text


def test_what_was_kept_is_added_after_the_reduction():
    """It was not reduced: each device would have its own only."""
    dag = one_bucket(GradientUse.ADD)
    added, reduction, update = (of_kind(dag, kind) for kind in (AddKept, AllReduce, Update))
    dag = reading(dag, reduction, **renamed(added.outputs, sums_of(added)))
    count = len(added.outputs)
    dag, late = again(dag, added, (*reduction.outputs, *added.inputs[count:]))
    dag = dataclasses.replace(dag, nodes={i: n for i, n in dag.nodes.items() if i != added.id})
    assert "missing: what device" in wrong(reading(dag, update, **renamed(reduction.outputs, late)))


def test_what_is_kept_was_reduced():
    """The updating step would reduce it a second time."""
    reduction = of_kind(one_bucket(GradientUse.UPDATE), AllReduce)
    dag = one_bucket(GradientUse.KEEP)
    keep = of_kind(dag, Keep)
    sums = sums_of(keep)
    like = replace_struct(reduction, outputs=sums)
    dag, reduced = again(dag, like, sums)
    text = wrong(reading(dag, keep, **renamed(sums, reduced)))
    assert "what devices keep of the gradient of 'w0' should be all of it together" in text
    assert "2 times: contribution" in text


@pytest.mark.parametrize("level", ["shard_grads", "shard_params"])
def test_a_slice_that_is_not_kept(level):
    dag = one_bucket(GradientUse.KEEP, **{level: True})
    changed = {
        node.id: replace_struct(node, devices=node.devices[:1])
        for node in (of_kind(dag, Keep), of_kind(dag, Sum))
    }
    text = wrong(dataclasses.replace(dag, nodes={**dag.nodes, **changed}))
    assert "what devices keep of the gradient of 'w0' slice 1 should be all of it" in text


@pytest.mark.parametrize("replicas", [0, 1])
def test_gradients_that_a_device_does_not_keep(replicas):
    dag = one_bucket(GradientUse.KEEP)
    changed = {
        node.id: replace_struct(node, devices=node.devices[:replicas])
        for node in (of_kind(dag, Keep), of_kind(dag, Sum))
    }
    dag = without(dag, Keep, Sum)
    if replicas:
        dag = dataclasses.replace(dag, nodes={**dag.nodes, **changed})
    text = wrong(dag)
    assert "what devices keep of the gradient of 'w0' should be all of it together" in text
    assert "from device 1" in text
    assert ("from device 0" in text) == (replicas == 0)


def test_gradients_that_are_kept_twice():
    dag = one_bucket(GradientUse.KEEP)
    keep = of_kind(dag, Keep)
    dag, _ = again(dag, keep, keep.inputs)
    assert "stored the next step's value there" in refusals(dag)


def test_what_is_kept_is_not_divided():
    dag = one_bucket(GradientUse.KEEP, weighted=True)
    keep = of_kind(dag, Keep)
    count = len(keep.work.parameters)
    spoiled = replace_struct(
        keep,
        work=replace_struct(keep.work, scaled=False),
        inputs=(*keep.inputs[:count], *keep.inputs[count + 1 :]),
    )
    text = wrong(dataclasses.replace(dag, nodes={**dag.nodes, keep.id: spoiled}))
    assert "must be divided by the total loss weight exactly once" in text


@pytest.mark.parametrize("use", [GradientUse.KEEP, GradientUse.ADD])
@pytest.mark.parametrize("level", LEVELS)
def test_folded_plans(level, use):
    """Devices without a program keep, and add, what those do that stand for them."""
    flags = {} if level is None else {level: True}
    strategy = pipeline(2, replicas=4, microbatches=2, **flags)
    for weighted in (False, True):
        dag = apply(chain(2, ROWS, weighted=weighted, tied=True), strategy)
        dag = derive(use_gradients(dag, use, Clip(Norm.L2, 1.0)).dag)
        planned = plan(dag, fold=True)
        assert any(len(role) > 1 for role in planned.roles)
        verify(planned)


def test_a_step_that_keeps_and_updates():
    dag = dataclasses.replace(dag_of(norm=None), gradient_use=GradientUse.KEEP)
    assert "nothing is updated in a step that keeps its gradients" in wrong(dag)
