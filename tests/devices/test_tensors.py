"""What devices do to tensors before and after an all-to-all."""

import pytest
import torch

from piper.devices.cpu import CpuDevice

DEVICE = CpuDevice()


def exchanged(flats: list[torch.Tensor]) -> list[torch.Tensor]:
    """Member i gets the i-th of equal parts of every member's tensor."""
    count = len(flats)
    return [torch.cat([flat.chunk(count)[i] for flat in flats]) for i in range(count)]


@pytest.mark.parametrize(
    ("sizes", "expert_dim", "token_dim"),
    [((4, -1, 3), 0, 1), ((5, 4, -1), 1, 2), ((-1, 3, 4), 2, 0)],
)
def test_each_member_gets_its_experts_tokens_and_gives_them_back(sizes, expert_dim, token_dim):
    tokens, count = 5, 2
    shape = tuple(tokens if n == -1 else n for n in sizes)
    given = [torch.randn(shape).reshape(-1, shape[-1]) for _ in range(count)]
    part = tuple(n // count if i == expert_dim else n for i, n in enumerate(sizes))
    inside = tuple(
        tokens * count if i == token_dim else n // count if i == expert_dim else n
        for i, n in enumerate(shape)
    )
    sent = [DEVICE.split_parts(x, sizes, expert_dim, count) for x in given]
    held = [DEVICE.join_parts(x.chunk(count), part, token_dim, inside) for x in exchanged(sent)]
    for me, found in enumerate(held):
        parts = [x.view(shape).chunk(count, expert_dim)[me] for x in given]
        assert torch.equal(found, torch.cat(parts, token_dim))
    back = [DEVICE.split_parts(x, part, token_dim, count) for x in held]
    for x, flat in zip(given, exchanged(back), strict=True):
        assert torch.equal(DEVICE.join_parts(flat.chunk(count), part, expert_dim, x.shape), x)


def test_one_of_the_parts_may_come_last():
    x = torch.arange(12).view(3, 4)
    parts = x.chunk(3)
    for last in range(3):
        others = [part for i, part in enumerate(parts) if i != last]
        expected = torch.cat([*others, parts[last]]).view(-1)
        assert torch.equal(DEVICE.split_parts(x, (3, 4), 0, 3, last), expected)


@pytest.mark.parametrize("received", [[[2, 0, 1], [1, 3, 0]], [[0, 0], [0, 0]], [[0], [4]]])
def test_rows_are_sorted_by_expert_and_back(received):
    width, numbers = 2, [n for sender in received for n in sender]
    rows = torch.arange(sum(numbers) * width).view(-1, width)
    owner = [
        (e, s) for s, sender in enumerate(received) for e, n in enumerate(sender) for _ in range(n)
    ]
    order = sorted(range(len(owner)), key=lambda i: owner[i])
    found = DEVICE.rows_by_expert(rows.reshape(-1), received, (len(owner) + 2, width))
    assert torch.equal(found[: len(owner)], rows[order])
    assert not found[len(owner) :].any()
    assert torch.equal(DEVICE.rows_by_sender(found, received), rows.reshape(-1))
