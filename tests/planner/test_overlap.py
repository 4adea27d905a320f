"""Overlap groups: chunks of a forward and a backward take turns, so that one's communication hides
behind the other's compute.
"""

import pytest
from tests.support.synthetic import HIDDEN, SCALAR, Builder, chain

from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import OrderError
from piper.ir.dag import Chunk, Comm, Dag, Pass, Role
from piper.ops.compute import Compute
from piper.plan.codec import decode_plan, encode_plan
from piper.plan.text import overlap_text, plan_text
from piper.planner import plan
from piper.planner.streams import total_order
from piper.verify import verify

SPLIT = Split({}, num_microbatches=2)


def ping_pong(links: int, *, forward_links: bool = True) -> Dag:
    """Region P=0 is ``links + 1`` chunks forward and as many backward; between two of them a chunk
    of region Q runs elsewhere: its result has to come back. Without *forward_links*, forward chunks
    follow each other at once (regions inside P=0).
    """
    b = Builder(64)
    x, seed = b.value(HIDDEN, Role.INPUT, "inputs"), b.value(SCALAR, Role.SEED)
    weight = b.value(HIDDEN, Role.PARAMETER, "w")
    value = x
    for i in range(links + 1):
        inner = () if forward_links else (("I", i),)
        last = i == links
        made = b.value(SCALAR if last else HIDDEN)
        b.chunk((("P", 0), *inner), Pass.FORWARD, [value, weight], [made])
        value = made
        if not last and forward_links:
            value = b.value(HIDDEN)
            b.chunk((("Q", 0),), Pass.FORWARD, [made], [value])
    b.losses = (value,)
    gradient = seed
    for i in range(links + 1):
        last = i == links
        made = b.contribution("w") if last else b.value(HIDDEN)
        b.chunk((("P", 0),), Pass.BACKWARD, [gradient, value], [made])
        if not last:
            gradient = b.value(HIDDEN)
            b.chunk((("Q", 0),), Pass.BACKWARD, [made], [gradient])
    return b.build()


PLACED = [Place({"P": 0}, [0]), Place({"Q": 0}, [1]), SPLIT]


def step(pass_: str, m: int):
    return {"P": 0, "MB": m, "PASS": pass_}


OVERLAP = Order([[step("F", 0)], [step("F", 1), step("B", 0)], [step("B", 1)]])
SERIAL = Order([[step("F", 0)], [step("F", 1)], [step("B", 0)], [step("B", 1)]])


def seconds(dag: Dag, chunk: float = 1.0, comm: float = 0.45) -> dict[int, float]:
    """Chunks of P as long as *chunk*, messages *comm*, all else next to nothing."""

    def of(node) -> float:
        if isinstance(node, Comm):
            return comm
        return chunk if dict(node.tags).get("P") == 0 and not node.derived else 1e-6

    return {n.id: of(n) for n in dag.nodes.values()}


def group(dag: Dag, order) -> str:
    """The overlapping chunks in *order*, as a string of passes."""
    found = [dag.nodes[n] for n in order if n in dag.overlaps[0].nodes]
    return "".join(c.pass_.value for c in found)


def span(dag: Dag, order, lengths) -> float:
    """When the last chunk of P ends if device 0 runs its chunks in *order*, each as soon as its
    inputs are there.
    """
    ends: dict[int, float] = {}
    free = 0.0
    for node in order:
        start = max((ends[p] for p in dag.predecessors[node]), default=0.0)
        chunk = dag.nodes[node]
        if isinstance(chunk, Chunk) and 0 in chunk.participants:
            start = max(start, free)
            free = start + lengths[node]
        ends[node] = start + lengths[node]
    return free


def test_chunks_take_turns_and_messages_hide():
    dag = apply(ping_pong(3), [*PLACED, OVERLAP])
    lengths = seconds(dag)
    order = total_order(dag, lengths)
    assert group(dag, order) in ("FB" * 4, "BF" * 4)
    serial = apply(ping_pong(3), [*PLACED, SERIAL])
    alone = span(serial, total_order(serial, seconds(serial)), seconds(serial))
    # In the group no message is waited for: three round trips of two messages for each of the two
    # passes.
    assert span(dag, order, lengths) == pytest.approx(alone - 6 * 0.9, abs=1e-3)


def test_what_waits_for_messages_goes_first():
    """The forward has none: its chunks are kept to fill the gaps of the backward, though the rest
    of the step waits for them too.
    """
    dag = apply(ping_pong(3, forward_links=False), [*PLACED, OVERLAP])
    for comm in (0.1, 0.45):
        assert group(dag, total_order(dag, seconds(dag, comm=comm)))[:6] == "BFBFBF"


def test_given_durations_decide():
    """Where a forward chunk takes longer than the messages of two backward chunks, fewer of them
    fit between.
    """
    dag = apply(ping_pong(3), [*PLACED, OVERLAP])
    slow = seconds(dag, comm=3.0)
    for node in dag.overlaps[0].nodes:
        if dag.nodes[node].pass_ is Pass.BACKWARD:
            slow[node] = 0.1
    fast = seconds(dag)
    assert span(dag, total_order(dag, slow), slow) <= span(dag, total_order(dag, fast), slow)


def test_groups_survive_what_comes_after():
    """Splits of batch and backward, plans and their files."""
    both = [
        Place({"P": 0}, [0]),
        Place({"Q": 0}, [1]),
        Split({}, "OUTER", 2),
        Order([[{"P": 0, "OUTER": 0, "PASS": "B"}, {"P": 0, "OUTER": 1, "PASS": "F"}]]),
        Split({}, "INNER", 2),
        Order([[{"PASS": "BI"}], [{"PASS": "BW"}]]),
    ]
    dag = apply(ping_pong(2), both)
    assert [len(o.nodes) for o in dag.overlaps] == [6, 6]
    for m, overlap in enumerate(dag.overlaps):
        chunks = [dag.nodes[n] for n in overlap.nodes]
        assert {dict(c.tags)["INNER"] for c in chunks} == {m}
        assert {c.pass_.value for c in chunks} == {"F", "BI", "BW"}
    planned = plan(dag)
    verify(planned)
    assert decode_plan(encode_plan(planned)) == planned


def test_the_choice_is_seen_in_the_text():
    planned = plan(apply(ping_pong(1), [*PLACED, OVERLAP]))
    verify(planned)
    (line,) = overlap_text(planned).splitlines()
    assert line.startswith("device 0 overlap 0 (directive 3): ")
    steps = line.split(": ")[1].split(", ")
    assert [s for s in steps if "[" not in s] == [
        planned.dag.nodes[i.node].label
        for i in planned.devices[0].instructions
        if isinstance(i, Compute) and i.node in planned.dag.overlaps[0].nodes
    ]
    assert "[transfer B P=0 MB=0]" in steps
    marked = [x for x in plan_text(planned).splitlines() if x.endswith("[overlap 0]")]
    assert len(marked) == 4
    assert overlap_text(plan(apply(ping_pong(1), [*PLACED, SERIAL]))) == ""


# --- members that need each other -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "needs", "makes"),
    [
        ([("F", 0), ("B", 0)], "B PP=0 MB=0", "F PP=0 MB=0"),
        ([("B", 0), ("F", 1), ("F", 0)], "B PP=0 MB=0", "F PP=0 MB=0"),
        ([("BI", 2), ("BW", 2)], "BW PP=2 MB=2", "BI PP=2 MB=2"),
    ],
)
def test_dependent_members_are_refused(members, needs, makes):
    """Also if the way leads over other devices, and in whatever order they are named."""
    strategy = [*(Place({"PP": s}, [s]) for s in range(3)), Split({}, num_microbatches=4)]
    stage = 2 if members[0][0] == "BI" else 0
    group_ = [{"PP": stage, "MB": m, "PASS": p} for p, m in members]
    with pytest.raises(OrderError, match=f"directive 4.*'{needs}' needs what '{makes}' makes"):
        apply(chain(3), [*strategy, Order([group_])])


def test_stages_of_one_device_that_feed_each_other_are_refused():
    strategy = [Place({"PP": [0, 2]}, [0]), Place({"PP": 1}, [1]), SPLIT]
    steps = [{"PP": s, "MB": 0, "PASS": "F"} for s in (0, 2)]
    with pytest.raises(OrderError, match="'F PP=2 MB=0' needs what 'F PP=0 MB=0' makes"):
        apply(chain(3), [*strategy, Order([steps])])


def test_what_is_no_dependence():
    """One filter's chunks may feed each other, as may chunks on different devices; buffers pass
    between microbatches.
    """
    strategy = [Place({"PP": [0, 2]}, [0]), Place({"PP": 1}, [1]), SPLIT]
    free = [
        [{"MB": 0, "PASS": "F"}, {"MB": 1, "PASS": "F"}],
        [{"PP": 0, "MB": 0, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "F"}],
        [{"PP": 0, "PASS": "F"}, {"PP": 0, "MB": 1, "PASS": "F"}],
    ]
    for members in free:
        verify(plan(apply(chain(3, buffer=True), [*strategy, Order([members])])))
