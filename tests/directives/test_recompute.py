"""Recompute: what the rewrite does to chunks, bodies and values. That the numbers stay the same:
tests/equality/test_recompute.py.
"""

import json

import pytest
from tests.support.synthetic import HIDDEN, OPAQUE, SCALAR, WEIGHT, Builder, chain

import piper
from piper.dtypes import DType
from piper.errors import DirectiveError, FilterError
from piper.ir import body as ir
from piper.ir.body import Body, Ref, TensorSpec, body_id
from piper.ir.dag import Chunk, Dag, Pass, Role
from piper.ops.compute import Call
from piper.planner import plan
from piper.verify import verify

MASK = TensorSpec(HIDDEN.shape, DType.BOOL)


def chunks(dag: Dag) -> dict[str, Chunk]:
    """The core chunks by label; several of one label are numbered."""
    found: dict[str, Chunk] = {}
    for chunk in dag.chunks():
        if not chunk.derived:
            label, number = chunk.label, 2
            while label in found:
                label, number = f"{chunk.label} ({number})", number + 1
            found[label] = chunk
    return found


def operators(dag: Dag, chunk: Chunk) -> list[str]:
    """What the chunk's body calls, in order."""
    return [
        call.target.removesuffix(".default").removesuffix(".Tensor")
        for call in dag.bodies[chunk.work.body].calls
    ]


def recomputed(dag: Dag, *directives) -> Dag:
    """*dag* after *directives*, whose plan is verified."""
    dag = piper.apply(dag, directives)
    verify(plan(dag))
    return dag


# --- a pipeline whose forwards make a second result for their backwards ---------------------------


def test_the_backward_makes_what_the_forward_kept_for_it():
    """Each backward read ``output1`` of its forward, and what the forward read."""
    before = piper.apply(chain(3, multi=True), [])
    after = recomputed(chain(3, multi=True), piper.Recompute({"PP": 1}))
    old, new = chunks(before), chunks(after)
    assert [len(c.outputs) for c in (old["F PP=1"], new["F PP=1"])] == [2, 1]
    kept = old["F PP=1"].outputs[1]
    assert kept in old["B PP=1"].inputs
    assert kept not in new["B PP=1"].inputs
    assert kept not in after.values
    assert operators(after, new["F PP=1"]) == [OPAQUE[0]]
    assert operators(after, new["B PP=1"]) == [
        OPAQUE[1],
        *operators(before, old["B PP=1"]),
    ]
    assert set(new["F PP=1"].inputs) <= set(new["B PP=1"].inputs)
    assert new["B PP=1"].outputs == old["B PP=1"].outputs
    for label in ("F PP=0", "B PP=0", "F PP=2", "B PP=2"):
        assert new[label] == old[label]


def test_no_forward_result_is_read_but_those_that_other_regions_read():
    dag = recomputed(chain(3, multi=True), piper.Recompute({}))
    found = chunks(dag)
    assert [len(found[f"F PP={s}"].outputs) for s in range(3)] == [1, 1, 1]
    assert set(dag.bodies) == {c.work.body for c in found.values()}


def test_the_backward_of_the_loss_waits_for_the_loss():
    """Nothing else would keep it behind its forward, of which it now reads nothing."""
    dag = recomputed(chain(3, multi=True), piper.Recompute({}), piper.Split({}, num_microbatches=2))
    found = chunks(dag)
    for m, loss in enumerate(dag.losses):
        assert loss in found[f"B PP=2 MB={m}"].inputs
    ancestors: dict[int, set[int]] = {}
    for node, before in sorted(dag.predecessors.items()):
        ancestors[node] = set(before).union(*(ancestors.get(b, ()) for b in before))
    for label, chunk in found.items():
        if label.startswith("B "):
            assert found[f"F {label[2:]}"].id in ancestors[chunk.id]


@pytest.mark.parametrize(
    "strategy",
    [
        [piper.Split({}, num_microbatches=2), *piper.placements.chain([[0], [1], [2]])],
        [*piper.placements.chain([[0, 1], [2, 3], [4, 5]]), piper.Replicate({}, shard_params=True)],
        [piper.Split({}, num_microbatches=2), piper.Split({}, "SUB", 2)],
        [
            *piper.placements.chain([[0], [1], [2]]),
            piper.Split({}, num_microbatches=4),
            *piper.schedules.one_f_one_b(num_stages=3, num_microbatches=4),
        ],
    ],
    ids=["split then place", "replicate", "split twice", "order"],
)
def test_the_place_in_the_program_does_not_matter(strategy):
    def description(dag: Dag) -> dict[str, object]:
        return {
            label: (c.work, len(c.inputs), len(c.outputs), c.devices)
            for label, c in chunks(dag).items()
        }

    found = [
        recomputed(
            chain(3, multi=True, skip=True),
            *strategy[:i],
            piper.Recompute({"PP": [1, 2]}),
            *strategy[i:],
        )
        for i in range(len(strategy) + 1)
    ]
    assert all(description(dag) == description(found[0]) for dag in found)
    assert {c.recompute is None for c in chunks(found[0]).values()} == {True, False}


def test_equal_microbatches_share_their_bodies():
    dag = recomputed(chain(2, multi=True), piper.Split({}, num_microbatches=8), piper.Recompute({}))
    assert len(dag.bodies) == 4


def test_some_microbatches():
    dag = recomputed(
        chain(2, multi=True), piper.Split({}, num_microbatches=4), piper.Recompute({"MB": [0, 2]})
    )
    found = chunks(dag)
    assert [len(found[f"F PP=0 MB={m}"].outputs) for m in range(4)] == [1, 2, 1, 2]


def test_matching_one_pass_matches_the_region():
    whole = recomputed(chain(2, multi=True), piper.Recompute({"PP": 0}))
    for pass_ in ("F", "B"):
        part = recomputed(chain(2, multi=True), piper.Recompute({"PP": 0, "PASS": pass_}))
        assert part.nodes == whole.nodes


@pytest.mark.parametrize("split_first", [False, True])
def test_buffers_are_read_as_the_forward_read_them_and_written_once(split_first):
    directives = [piper.Recompute({}), piper.Split({}, num_microbatches=3)]
    dag = recomputed(
        chain(2, batch_size=12, multi=True, buffer=True),
        *(directives[::-1] if split_first else directives),
    )
    found = chunks(dag)
    written = [found[f"F PP=0 MB={m}"].outputs[-1] for m in range(3)]
    assert dag.buffer_updates["count"] == written[-1]
    for m in range(3):
        forward, backward = found[f"F PP=0 MB={m}"], found[f"B PP=0 MB={m}"]
        (before,) = [v for v in forward.inputs if v in written or _is_buffer(dag, v)]
        assert _is_buffer(dag, before) if m == 0 else before == written[m - 1]
        assert before in backward.inputs
        assert written[m] not in backward.inputs


def _is_buffer(dag: Dag, value: int) -> bool:
    return dag.values[value].role is Role.BUFFER


# --- bodies that mean something -----------------------------------------------------------------


def call(target: str, *args: ir.Arg, results=(HIDDEN,), rng=None) -> ir.Call:
    """A call of an ATen operator."""
    overload = "Tensor" if target in ("add", "mul") else "default"
    name = target if target == "operator.getitem" else f"aten.{target}.{overload}"
    return ir.Call(name, args, (), results, rng)


class Real(Builder):
    """Chunks with bodies that the test writes."""

    def written(self, pass_, inputs, outputs, calls, returns, rng=(), tags=(("R", 0),)):
        """A chunk that calls *calls* (references from ``len(inputs)`` on) and returns *returns*."""
        specs = tuple(self.values[v].spec for v in inputs)
        node = self.chunk(tags, pass_, inputs, outputs)
        body = Body(specs, tuple(calls), tuple(returns), len(rng))
        self.bodies[body_id(body)] = body
        chunk = self.nodes[node]
        self.nodes[node] = Chunk(
            node, chunk.tags, pass_, chunk.inputs, chunk.outputs, Call(body_id(body), rng)
        )


def noisy() -> Dag:
    """The loss is ``gelu(dropout(bias + x @ w))`` and random numbers that only the forward needs,
    summed; ordinals 5, 6, 7.
    """
    b = Real(16)
    x = b.value(HIDDEN, Role.INPUT, "inputs")
    w, bias = (b.value(WEIGHT, Role.PARAMETER, name) for name in ("w", "bias"))
    loss, dropped, mask = b.value(SCALAR), b.value(HIDDEN), b.value(MASK)
    forward = [
        call("rand_like", Ref(0), rng=0),  # 3
        call("addmm", Ref(2), Ref(0), Ref(1)),  # 4
        call("native_dropout", Ref(4), 0.5, True, results=(HIDDEN, MASK), rng=1),  # 5
        call("operator.getitem", Ref(5), 0),  # 6
        call("operator.getitem", Ref(5), 1, results=(MASK,)),  # 7
        call("rand_like", Ref(6), rng=2),  # 8
        call("gelu", Ref(6)),  # 9
        call("cat", ir.Sequence((Ref(9), Ref(3), Ref(8)))),  # 10
        call("sum", Ref(10), results=(SCALAR,)),  # 11
    ]
    b.written(Pass.FORWARD, [x, w, bias], [loss, dropped, mask], forward, [11, 6, 7], (5, 6, 7))
    b.losses = (loss,)
    seed = b.value(SCALAR, Role.SEED)
    backward = [
        call("gelu_backward", Ref(1), Ref(2)),
        call("native_dropout_backward", Ref(4), Ref(0), 2.0),
        call("mm", Ref(3), Ref(5), results=(WEIGHT,)),
    ]
    reads = [mask, seed, dropped, x]
    made = [b.contribution("w"), b.contribution("bias")]
    b.written(Pass.BACKWARD, reads, made, backward, [6, 6])
    return b.build()


def test_random_calls_keep_their_streams():
    dag = recomputed(noisy(), piper.Recompute({}))
    forward, backward = chunks(dag)["F R=0"], chunks(dag)["B R=0"]
    assert forward.work.rng == (5, 6, 7)
    assert backward.work.rng == (6,)
    body = dag.bodies[backward.work.body]
    assert body.num_rngs == 1
    assert operators(dag, backward) == [
        "aten.addmm",
        "aten.native_dropout",
        "operator.getitem",
        "operator.getitem",
        "aten.gelu_backward",
        "aten.native_dropout_backward",
        "aten.mm",
    ]
    infos = [dag.values[v] for v in backward.inputs]
    names = {info.name or info.role.value: i for i, info in enumerate(infos)}
    assert set(names) == {"seed", "inputs", "w", "bias", "activation"}
    assert set(backward.inputs) & set(forward.outputs) == set(dag.losses)
    first = len(body.inputs)
    assert body.calls[0].args == (Ref(names["bias"]), Ref(names["inputs"]), Ref(names["w"]))
    assert body.calls[1].args == (Ref(first), 0.5, True)
    assert body.calls[4].args == (Ref(names["seed"]), Ref(first + 2))
    assert body.calls[5].args == (Ref(first + 4), Ref(first + 3), 2.0)
    assert body.calls[6].args == (Ref(names["inputs"]), Ref(first + 5))
    assert body.outputs == (first + 6, first + 6)


@pytest.mark.parametrize("save", [["addmm"], ["matmul"], ["addmm", "gelu"]])
def test_saved_operators_are_not_run_again(save):
    """The forward gains a result, the product; what follows it is recomputed."""
    dag = recomputed(noisy(), piper.Recompute({}, save=save))
    forward, backward = chunks(dag)["F R=0"], chunks(dag)["B R=0"]
    assert operators(dag, backward)[0] == "aten.native_dropout"
    (product,) = set(forward.outputs) - set(dag.losses)
    assert product in backward.inputs
    assert dag.values[product].spec == HIDDEN
    body = dag.bodies[forward.work.body]
    made = dict(zip(forward.outputs, body.outputs, strict=True))[product]
    assert body.calls[made - len(body.inputs)].target == "aten.addmm.default"


def test_saving_one_of_several_results_saves_results_not_the_call():
    """``native_dropout`` has two, and the backward reads both."""
    dag = recomputed(noisy(), piper.Recompute({}, save=["native_dropout"]))
    before, after = (chunks(d) for d in (piper.apply(noisy(), []), dag))
    assert after["B R=0"].work == before["B R=0"].work
    assert after["F R=0"].outputs == before["F R=0"].outputs


def test_saving_a_result_that_is_no_tensor_is_not_possible():
    """Its call runs again."""
    b = Real(16)
    x, loss, kept = b.value(HIDDEN, Role.INPUT, "inputs"), b.value(SCALAR), b.value(HIDDEN)
    forward = [
        call("_weight_norm_interface", Ref(0), results=(HIDDEN, None)),
        call("operator.getitem", Ref(1), 0),
        call("operator.getitem", Ref(1), 1, results=(None,)),
        call("roll", Ref(2), Ref(3)),
        call("sum", Ref(4), results=(SCALAR,)),
    ]
    b.written(Pass.FORWARD, [x], [loss, kept], forward, [5, 4])
    b.losses = (loss,)
    made, seed = b.value(HIDDEN), b.value(SCALAR, Role.SEED)
    b.written(Pass.BACKWARD, [seed, kept], [made], [call("mul", Ref(0), Ref(1))], [2])
    found = recomputed(b.build(), piper.Recompute({}, save=["_weight_norm_interface"]))
    assert operators(found, chunks(found)["B R=0"]) == [
        "aten._weight_norm_interface",
        "operator.getitem",
        "aten.roll",
        "aten.mul",
    ]


def test_sharded_parameters_are_gathered_for_the_recomputation():
    """The bias was read by the forward alone."""
    sharded = piper.Replicate({}, [0, 1], shard_params=True)

    def gathered(*directives) -> list[str]:
        dag = recomputed(noisy(), *directives)
        infos = [dag.values[v] for v in chunks(dag)["B R=0"].inputs]
        assert Role.PARAMETER not in {info.role for info in infos}
        return sorted(info.name for info in infos if info.role is Role.GATHERED)

    assert gathered(sharded) == []
    assert gathered(sharded, piper.Recompute({})) == ["bias", "w"]
    assert gathered(piper.Recompute({}), sharded) == ["bias", "w"]


def test_each_chunk_of_a_region_is_recomputed_from_what_it_read():
    """R=0 is two forward chunks with R=1 between; the second reads results of the first one, too.
    The backward reads results of both.
    """
    b = Real(16)
    x, w = b.value(HIDDEN, Role.INPUT, "inputs"), b.value(HIDDEN, Role.PARAMETER, "w")
    h, a, d, g, c = (b.value(HIDDEN) for _ in range(5))
    loss = b.value(SCALAR)
    b.written(
        Pass.FORWARD,
        [x, w],
        [h, a, d],
        [
            call("mm", Ref(0), Ref(1)),
            call("tanh", Ref(2)),
            call("exp", Ref(3)),
            call("neg", Ref(4)),
        ],
        [3, 4, 5],
    )
    b.written(Pass.FORWARD, [h], [g], [call("sin", Ref(0))], [1], tags=(("R", 1),))
    b.written(
        Pass.FORWARD,
        [g, h, d],
        [loss, c],
        [
            call("mul", Ref(0), Ref(1)),
            call("cos", Ref(3)),
            call("add", Ref(4), Ref(2)),
            call("sum", Ref(5), results=(SCALAR,)),
        ],
        [6, 4],
    )
    b.losses = (loss,)
    seed = b.value(SCALAR, Role.SEED)
    b.written(
        Pass.BACKWARD,
        [seed, a, c, h, x],
        [b.contribution("w")],
        [call("all", *(Ref(i) for i in range(5)))],
        [5],
    )
    dag = recomputed(b.build(), piper.Recompute({"R": 0}))
    found = chunks(dag)
    backward = found["B R=0"]
    assert set(backward.inputs) == {seed, g, h, x, w, loss}
    assert found["F R=0"].outputs == (h, d)
    assert found["F R=0 (2)"].outputs == (loss,)
    # h is there for the second part: the first one is recomputed only for what else is needed.
    assert operators(dag, backward) == [
        "aten.mm",
        "aten.tanh",
        "aten.exp",
        "aten.mul",
        "aten.cos",
        "aten.all",
    ]


def test_a_loss_that_the_backward_reads_is_not_recomputed():
    """As for a loss that ends in ``exp``: the number is there anyway."""
    b = Real(16)
    x, w = b.value(HIDDEN, Role.INPUT, "inputs"), b.value(WEIGHT, Role.PARAMETER, "w")
    loss, product = b.value(SCALAR), b.value(HIDDEN)
    forward = [
        call("mm", Ref(0), Ref(1)),
        call("sum", Ref(2), results=(SCALAR,)),
        call("exp", Ref(3), results=(SCALAR,)),
    ]
    b.written(Pass.FORWARD, [x, w], [loss, product], forward, [4, 2])
    b.losses = (loss,)
    reads = [b.value(SCALAR, Role.SEED), loss, product, x]
    backward = [call("all", *(Ref(i) for i in range(4)), results=(WEIGHT,))]
    b.written(Pass.BACKWARD, reads, [b.contribution("w")], backward, [4])
    dag = recomputed(b.build(), piper.Recompute({}))
    chunk = chunks(dag)["B R=0"]
    assert operators(dag, chunk) == ["aten.mm", "aten.all"]
    assert loss in chunk.inputs


def test_a_region_without_a_backward():
    b = Builder(16)
    x, loss = b.value(HIDDEN, Role.INPUT, "inputs"), b.value(SCALAR)
    b.chunk((("R", 0),), Pass.FORWARD, [x], [loss])
    b.losses = (loss,)
    dag = b.build()
    after = recomputed(dag, piper.Recompute({}, save=["whatever"]))
    assert [c.work for c in after.chunks()] == [c.work for c in dag.chunks()]


def test_a_region_that_saves_nothing():
    before = chunks(piper.apply(chain(3), []))
    after = chunks(recomputed(chain(3), piper.Recompute({"PP": 0})))
    assert {n: c.work for n, c in after.items()} == {n: c.work for n, c in before.items()}


# --- refusals and files -----------------------------------------------------------------------


def test_an_unknown_operator():
    with pytest.raises(DirectiveError) as caught:
        piper.apply(noisy(), [piper.Recompute({}, save=["native_drop_out"])])
    assert str(caught.value).endswith(
        "save names operator 'native_drop_out', which no matched forward calls (did you mean 'native_dropout'?); "
        "they call: addmm, cat, gelu, native_dropout, rand_like, sum"
    )
    with pytest.raises(DirectiveError, match="operator 'scaled_dot_product_attention'"):
        piper.apply(noisy(), [piper.Recompute({}, save=["scaled_dot_product_attention"])])


@pytest.mark.parametrize(
    "between", [[], [piper.Split({}, num_microbatches=2)]], ids=["at once", "split between"]
)
def test_a_region_recomputed_twice(between):
    strategy = [piper.Recompute({"PP": 0}), *between, piper.Recompute({"PP": [0, 1]})]
    with pytest.raises(
        DirectiveError,
        match=rf"directive {len(strategy) - 1}, .*'F PP=0.*' is recomputed twice: by directive 0 ",
    ):
        piper.apply(chain(2), strategy)


def test_disjoint_regions_in_turn():
    one = recomputed(chain(2, multi=True), piper.Recompute({"PP": 0}), piper.Recompute({"PP": 1}))
    both = recomputed(chain(2, multi=True), piper.Recompute({}))
    assert {n: c.work for n, c in chunks(one).items()} == {
        n: c.work for n, c in chunks(both).items()
    }


def test_filters_that_match_nothing():
    with pytest.raises(FilterError, match="no node has PP=9"):
        piper.apply(chain(2), [piper.Recompute({"PP": 9})])
    with pytest.raises(DirectiveError, match="match those"):
        piper.apply(chain(2), [piper.Recompute({"PASS": "UPDATE"})])


def test_files(tmp_path):
    path = tmp_path / "strategy.json"
    strategy = [piper.Recompute({"PP": [0, 2]}), piper.Recompute({"PP": 1}, save=["mm", "gelu"])]
    piper.dump_strategy(strategy, path)
    assert piper.load_strategy(path) == strategy
    assert json.loads(path.read_text()) == [
        {"op": "recompute", "filter": {"PP": [0, 2]}},
        {"op": "recompute", "filter": {"PP": 1}, "save": ["mm", "gelu"]},
    ]
