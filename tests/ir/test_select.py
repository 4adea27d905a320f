import pytest
from msgspec.structs import replace as replace_struct
from tests.support.synthetic import chain

from piper.directives.place import Place
from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.errors import FilterError
from piper.ir.dag import Chunk, Pass
from piper.ir.edit import replace_nodes
from piper.ir.select import Selector


@pytest.fixture(scope="module")
def dag():
    strategy = [
        Replicate({}),
        Place({"PP": 0}, [0, 1]),
        Place({"PP": 1}, [2, 3]),
        Place({"PP": 2}, [4, 5]),
        Split({}, num_microbatches=4),
    ]
    return apply(chain(3), strategy)


@pytest.fixture(scope="module")
def find(dag):
    selector = Selector(dag)

    def labels(filter_):
        return [dag.nodes[n].label for n in selector.find(filter_)]

    return labels


def test_an_empty_filter_matches_every_core_chunk_and_nothing_derived(dag, find):
    core = [c.label for c in dag.chunks() if not c.derived]
    assert len(core) == 3 * 2 * 4
    assert find({}) == core


def test_index_list_and_star(find):
    assert find({"PP": 1, "MB": 2}) == ["F PP=1 MB=2", "B PP=1 MB=2"]
    assert sorted(find({"PP": [0, 2], "MB": 3, "PASS": "F"})) == ["F PP=0 MB=3", "F PP=2 MB=3"]
    assert find({"PP": "*"}) == find({})
    assert find({"PP": []}) == []
    # A node that answers to several of the alternatives is found once.
    assert find({"PP": [1, "*"]}) == find({})


def test_none_means_without_that_tag():
    dag = chain(2)
    loose = replace_struct(dag.nodes[0], tags=())
    selector = Selector(replace_nodes(dag, {loose.id: loose}).dag)
    assert selector.find({"PP": None}) == [0]
    assert selector.find({"EP": None}) == list(dag.nodes)
    assert 0 not in selector.find({"PP": "*"})


def test_passes(find):
    assert len(find({"PASS": "F"})) == 12
    assert len(find({"PASS": ["F", "B"]})) == 24
    assert find({"PASS": "*"}) == find({})
    assert find({"PASS": "BI"}) == []  # a pass that exists nowhere is empty, not an error
    assert find({"PASS": "UPDATE", "PP": 1}) == ["sum UPDATE PP=1", "UPDATE PP=1"]


def test_b_means_both_halves_and_each_half_itself():
    dag = chain(2)
    b = next(n for n in dag.chunks() if n.pass_ is Pass.BACKWARD)
    halves = {
        100: replace_struct(b, id=100, pass_=Pass.BACKWARD_INPUT, outputs=(), inputs=()),
        101: replace_struct(b, id=101, pass_=Pass.BACKWARD_WEIGHT, outputs=(), inputs=()),
    }
    selector = Selector(replace_nodes(dag, halves).dag)
    assert {100, 101, b.id} <= set(selector.find({"PASS": "B"}))
    assert selector.find({"PASS": "BI"}) == [100]
    assert selector.find({"PASS": ["BI", "BW"]}) == [100, 101]


def test_communication_matches_only_where_it_is_named(dag, find):
    assert all(isinstance(n, Chunk) for n in (dag.nodes[i] for i in Selector(dag).find({"PP": 0})))
    assert find({"COMM": "all_reduce", "PP": 1}) == ["all_reduce UPDATE PP=1"]
    assert find({"COMM": "transfer", "PP": 1, "MB": 0, "PASS": "F"}) == ["transfer F PP=1 MB=0"]
    assert len(find({"COMM": "*"})) == 3 + 2 * 2 * 4
    assert find({"COMM": None, "PP": 0}) == find({"PP": 0})


@pytest.mark.parametrize(
    ("filter_", "complaint"),
    [
        ({"PQ": 0}, "tag 'PQ', which no node has (did you mean 'PP'?); tags: MB 0–3, PP 0–2"),
        ({"PP": 3}, "no node has PP=3"),
        ({"PP": [0, 9]}, "no node has PP=9"),
        ({"PP": "0"}, "no node has PP='0'"),
        ({"MB": 4}, "no node has MB=4"),
        ({"PASS": "f"}, "PASS='f' is unknown"),
        (
            {"PASS": ["F", "BB"]},
            "PASS='BB' is unknown (did you mean 'B'?); known: F, B, BI, BW, UPDATE",
        ),
        ({"PASS": None}, "PASS=None is unknown"),
        ({"COMM": "all_redoce"}, "(did you mean 'all_reduce'?); known: all_reduce, transfer"),
    ],
)
def test_what_exists_nowhere_is_an_error(find, filter_, complaint):
    with pytest.raises(FilterError) as caught:
        find(filter_)
    assert complaint in str(caught.value)


def test_a_model_without_regions_says_so():
    dag = chain(2)
    bare = replace_nodes(dag, {n: replace_struct(c, tags=()) for n, c in dag.nodes.items()}).dag
    with pytest.raises(FilterError, match="no annotated region"):
        Selector(bare).find({"PP": 0})
