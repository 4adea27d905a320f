"""DualPipeV, written from scratch: the order in which each rank of a pipeline in a V works.

Shows that the orders are the library's, and that what they train equals training in one process.

    python examples/dualpipev_from_scratch.py
"""

from collections import Counter, deque

import torch

import piper
from piper.models import Transformer, TransformerConfig, transformer_loss

Filter = dict[str, int | str]


def dualpipev(rank: int, num_ranks: int, num_microbatches: int) -> piper.Order:
    """The order of the rank that holds stage r, on the way down, and stage 2·R − 1 − r, on the way
    up.
    """
    down, up, left = rank, 2 * num_ranks - 1 - rank, num_ranks - 1 - rank
    forwards, backwards, waiting = Counter[int](), Counter[int](), deque[Filter]()

    def f(stage: int) -> Filter:
        forwards[stage] += 1
        return {"PP": stage, "MB": forwards[stage] - 1, "PASS": "F"}

    def b(stage: int, half: str = "") -> Filter:
        backwards[stage] += 1
        if half:
            waiting.append({"PP": stage, "MB": backwards[stage] - 1, "PASS": "BW"})
        return {"PP": stage, "MB": backwards[stage] - 1, "PASS": "B" + half}

    groups: list[list[Filter]] = [[f(down)] for _ in range(2 * left)]
    for _ in range(rank + 1):
        groups += [[f(down)], [f(up)]]
    for _ in range(left):
        groups += [[b(up, "I")], [waiting.popleft()], [f(up)]]
    for i in range(num_microbatches - 2 * num_ranks + rank + 1):
        pair = [f(down), b(up)]  # overlap, but for the first pair of the rank where the V turns
        groups += [[step] for step in pair] if i == left == 0 else [pair]
        groups += [[f(up), b(down)]]
    for _ in range(left):
        groups += [[b(up)], [f(up), b(down)]]
    for i in range(2 * rank + 2):
        groups += [[b(down if i % 2 else up, "I" if i > rank else "")]]
    for _ in range(left):
        groups += [[waiting.popleft()], [b(down, "I")]]
    return piper.Order(groups + [[half] for half in waiting])


def main() -> None:
    groups, num_microbatches = [[0], [1]], 6
    strategy = [
        *piper.placements.v_shape(groups),
        piper.Split({}, num_microbatches=num_microbatches),
        *(dualpipev(rank, len(groups), num_microbatches) for rank in range(len(groups))),
    ]
    library = piper.strategies.pipeline("dualpipev", groups, num_microbatches)
    print("the library's:", strategy == library)

    config = TransformerConfig(vocab_size=32, context=8, width=16, num_layers=4, num_stages=4)
    tokens = torch.randint(32, (num_microbatches, 9))
    report = piper.check(
        Transformer(config),
        transformer_loss,
        strategy,
        (tokens[:, :-1], tokens[:, 1:]),
        optimizer=torch.optim.SGD,
    )
    print("one process: largest error of a gradient:", report.max_grad_error)
    report.require()


if __name__ == "__main__":
    main()
