"""One contract for both communicators; members are threads, of gloo too."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed import HashStore

from piper.devices.gloo import GlooCommunicator
from piper.devices.memory import Hub
from piper.errors import CommunicationError
from piper.ids import DeviceId
from piper.ops.base import Communicator, Message, ReduceOp

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "uint8", "bool"]

Body = Callable[[Communicator], object]


def in_threads(make: Callable[[int], Communicator], size: int, body: Body) -> list[object]:
    """The members' results; raises the first failure."""
    results: list[object] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(make(rank))
        except Exception as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]
    return results


@pytest.fixture(params=["memory", "memory with delays", "gloo"])
def together(request):
    """``together(size, body)`` runs *body* as every member of one communicator."""

    def run(size: int, body: Body, timeout: float = 20.0) -> list[object]:
        members = tuple(DeviceId(10 + r) for r in range(size))
        if request.param == "gloo":
            store = HashStore()
            return in_threads(
                lambda r: GlooCommunicator("test", members, members[r], store, timeout=timeout),
                size,
                body,
            )
        delay = 0.02 if "delays" in request.param else 0.0
        hub = Hub(timeout=timeout, delay=delay, poison=True, seed=1)
        return in_threads(lambda r: hub.communicator("test", members, members[r]), size, body)

    return run


def values(dtype: str, rank: int, count: int = 6) -> torch.Tensor:
    numbers = (torch.arange(count) + rank) % 3
    return numbers.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, "complex128"])
def test_messages_carry_every_type_in_order(together, dtype):
    def body(me):
        if me.rank == 0:
            first, second = values(dtype, 0).reshape(2, 3), values(dtype, 1)
            handles = [me.send(first.t(), 1), me.send(second, 1)]
            first.zero_()  # a sent tensor is the sender's again at once
            for handle in handles:
                handle.wait()
            return None
        posted = [me.receive(Message((3, 2), dtype), 0), me.receive(Message((6,), dtype), 0)]
        for _, handle in reversed(posted):
            handle.wait()
        return [tensor for tensor, _ in posted]

    _, (first, second) = together(2, body)
    assert first.dtype == second.dtype == getattr(torch, dtype)
    assert torch.equal(first, values(dtype, 0).reshape(2, 3).t())
    assert torch.equal(second, values(dtype, 1))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 2, 1, 2, 1, 2, 3)])
def test_messages_of_any_shape(together, shape):
    sent = torch.randn(shape, dtype=torch.float64)

    def body(me):
        if me.rank == 0:
            me.send(sent, 1).wait()
            return None
        tensor, handle = me.receive(Message(shape, "float64"), 0)
        handle.wait()
        return tensor

    received = together(2, body)[1]
    assert torch.equal(received, sent)


def test_both_directions_at_once(together):
    big = 300_000

    def body(me):
        peer = 1 - me.rank
        tensor, received = me.receive(Message((big,), "float64"), peer)
        sent = me.send(torch.full((big,), float(me.rank), dtype=torch.float64), peer)
        received.wait()
        sent.wait()
        return tensor

    first, second = together(2, body)
    assert first.unique().tolist() == [1.0]
    assert second.unique().tolist() == [0.0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_sums_with_the_same_bits_everywhere(together, dtype, size):
    def body(me):
        flat = values(dtype, me.rank)
        me.all_reduce(flat).wait()
        return flat

    results = together(size, body)
    expected = sum(values(dtype, r).to(torch.float64) for r in range(size))
    if dtype == "bool":
        expected = expected > 0
    for result in results:
        assert result.dtype == getattr(torch, dtype)
        assert torch.equal(result.to(torch.float64), expected.to(torch.float64))
        assert torch.equal(result.view(torch.uint8), results[0].view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_of_the_maximum(together, dtype, size):
    def body(me):
        flat = values(dtype, me.rank)
        me.all_reduce(flat, ReduceOp.MAX).wait()
        return flat

    columns = [values(dtype, r).to(torch.float64) for r in range(size)]
    expected = torch.stack(columns).amax(0)
    for result in together(size, body):
        assert result.dtype == getattr(torch, dtype)
        assert torch.equal(result.to(torch.float64), expected)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_maximum_of_what_is_no_number_is_none(together, bad):
    """On whichever member it is; infinities are numbers."""

    def body(me):
        mine = [torch.nan if me.rank == bad else 5.0, -3.0 - me.rank, -torch.inf, torch.inf]
        flat = torch.tensor(mine, dtype=torch.float64)
        me.all_reduce(flat, ReduceOp.MAX).wait()
        return flat

    expected = torch.tensor([torch.nan, -3.0, -torch.inf, torch.inf], dtype=torch.float64)
    for result in together(3, body):
        assert torch.equal(
            result.nan_to_num(7.0, torch.inf, -torch.inf),
            expected.nan_to_num(7.0, torch.inf, -torch.inf),
        )


def test_all_reduce_of_inexact_sums_has_the_same_bits_everywhere(together):
    def body(me):
        flat = torch.randn(10_001, generator=torch.Generator().manual_seed(me.rank))
        me.all_reduce(flat).wait()
        return flat

    results = together(3, body)
    assert all(torch.equal(result, results[0]) for result in results)


def test_all_reduce_of_complex_numbers(together):
    def body(me):
        flat = torch.tensor([1 + 2j, 3j], dtype=torch.complex128) * (me.rank + 1)
        me.all_reduce(flat).wait()
        return flat

    for result in together(2, body):
        assert result.tolist() == [3 + 6j, 9j]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_concatenates_by_rank(together, dtype):
    def body(me):
        shard = values(dtype, me.rank, 4)
        out = torch.empty(12, dtype=shard.dtype)
        me.all_gather(out, shard).wait()
        return out

    expected = torch.cat([values(dtype, r, 4) for r in range(3)])
    assert all(torch.equal(out, expected) for out in together(3, body))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_gives_each_its_part_of_the_sum(together, dtype):
    def body(me):
        flat = values(dtype, me.rank, 6)
        out = torch.empty(2, dtype=flat.dtype)
        me.reduce_scatter(out, flat).wait()
        assert torch.equal(flat, values(dtype, me.rank, 6)), "the input is not an output"
        return out

    total = sum(values(dtype, r, 6).to(torch.float64) for r in range(3))
    if dtype == "bool":
        total = total > 0
    for rank, out in enumerate(together(3, body)):
        expected = total[2 * rank : 2 * rank + 2].to(torch.float64)
        assert torch.equal(out.to(torch.float64), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_in_flight_at_once(together, size):
    def body(me):
        flat = torch.arange(2.0 * size) + me.rank
        gathered, part = torch.empty(2 * size), torch.empty(2)
        nothing, again = torch.empty(0), torch.empty(2 * size)
        handles = [
            me.all_gather(gathered, flat[:2].clone()),
            me.reduce_scatter(part, flat),
            me.all_gather(nothing, torch.empty(0)),
            me.all_gather(again, flat[2:4].clone() if size > 1 else flat),
        ]
        for handle in reversed(handles):
            handle.wait()
        assert all(handle.done() for handle in handles)
        return gathered, part, again

    for rank, (gathered, part, again) in enumerate(together(size, body)):
        first = [[r, r + 1.0] for r in range(size)]
        assert gathered.view(size, 2).tolist() == first
        shift = 2.0 if size > 1 else 0.0
        assert again.view(size, 2).tolist() == [[a + shift, b + shift] for a, b in first]
        ranks = size * (size - 1) / 2
        assert part.tolist() == [size * (2.0 * rank + i) + ranks for i in range(2)]


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
def test_members_that_differ_about_a_length_never_meet(together, verb):
    def body(me):
        whole, part = torch.zeros(4 + 2 * me.rank), torch.zeros(2 + me.rank)
        getattr(me, verb)(*((whole, part) if verb == "all_gather" else (part, whole))).wait()

    with pytest.raises(CommunicationError):
        together(2, body, timeout=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_with_unequal_parts(together, dtype):
    # member i sends i + j elements to member j (some parts are empty)
    def body(me):
        given = [me.rank + j for j in range(3)]
        wanted = [i + me.rank for i in range(3)]
        flat = torch.cat([torch.full((n,), me.rank) for n in given]).to(getattr(torch, dtype))
        out = torch.empty(sum(wanted), dtype=flat.dtype)
        me.all_to_all(out, flat, wanted, given).wait()
        return out

    for rank, out in enumerate(together(3, body)):
        expected = torch.cat([torch.full((i + rank,), i) for i in range(3)]).to(out.dtype)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_copies_the_root(together, dtype):
    def body(me):
        flat = values(dtype, me.rank)
        me.broadcast(flat, 2).wait()
        return flat

    assert all(torch.equal(out, values(dtype, 2)) for out in together(3, body))


def test_done_follows_completion(together):
    gate = threading.Event()

    def body(me):
        if me.rank == 0:
            gate.wait(10)
            me.send(torch.ones(3), 1).wait()
            return None
        _, handle = me.receive(Message((3,), "float32"), 0)
        before = handle.done()
        gate.set()
        handle.wait()
        return before, handle.done()

    assert together(2, body)[1] == (False, True)


def test_a_wait_that_lasts_too_long_says_for_what(together):
    started = time.monotonic()

    def body(me):
        if me.rank == 1:
            _, handle = me.receive(Message((3,), "float32"), 0)
            handle.wait()
        else:
            time.sleep(2.5)

    with pytest.raises(CommunicationError, match=r"receive from .*'test'.*complete"):
        together(2, body, timeout=1.0)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("sent", "expected", "message"),
    [
        ((3,), Message((4,), "float32"), r"expected .*float32\[4\].* found .*float32\[3\]"),
        ((2, 2), Message((4,), "float32"), r"expected .*float32\[4\].* found .*float32\[2, 2\]"),
        ((4,), Message((4,), "int32"), r"expected .*int32\[4\].* found .*float32\[4\]"),
        ((4,), Message((2,), "float64"), r"expected .*float64\[2\].* found .*float32\[4\]"),
        ((1,), Message((1000,), "float32"), r"expected .*float32\[1000\].* found .*float32\[1\]"),
    ],
)
def test_a_message_of_another_kind_is_refused(together, sent, expected, message):
    def body(me):
        if me.rank == 0:
            with contextlib.suppress(CommunicationError):  # in memory the sender learns of it too
                me.send(torch.zeros(sent), 1).wait()
            time.sleep(0.2)
            return
        _, handle = me.receive(expected, 0)
        handle.wait()

    with pytest.raises(CommunicationError, match=message):
        together(2, body)
