"""Small strategies whose DAGs and plans are written out, to be read and reviewed.

``python -m tests.golden.cases`` writes the files anew; look at the difference before you commit it.
"""

from collections.abc import Callable
from pathlib import Path

from tests.support.synthetic import chain

from piper.directives.replicate import Replicate
from piper.directives.split import Split
from piper.directives.strategy import apply
from piper.ir.dag import Dag
from piper.plan.text import dag_text, plan_text
from piper.planner import plan
from piper.schedules.one_f_one_b import one_f_one_b
from piper.schedules.placements import chain as chained

FOLDER = Path(__file__).parent


def _pipeline() -> Dag:
    return apply(
        chain(2, batch_size=16),
        [*chained([[0], [1]]), Split({}, num_microbatches=2), *one_f_one_b(2, 2)],
    )


def _data_parallel() -> Dag:
    strategy = [
        Replicate({}, [0, 1], replicated_buffers="mean"),
        Split({}, num_microbatches=2),
    ]
    return apply(chain(2, batch_size=16, buffer=True), strategy)


def _tied() -> Dag:
    dag = chain(3, batch_size=16, tied=True, skip=True, weighted=True)
    return apply(dag, chained([[0], [1], [2]]))


CASES: dict[str, Callable[[], Dag]] = {
    "1f1b": _pipeline,
    "data_parallel": _data_parallel,
    "tied_weighted": _tied,
}


def text(name: str) -> str:
    """What the golden file of a case should hold."""
    planned = plan(CASES[name]())
    return f"{dag_text(planned.dag)}\n{plan_text(planned)}"


def path(name: str) -> Path:
    """The golden file of a case."""
    return FOLDER / f"{name}.txt"


if __name__ == "__main__":
    for case in CASES:
        path(case).write_text(text(case))
