"""Exchange the experts' tokens among the members of a group that holds the experts in equal parts."""

from collections.abc import Sequence
from typing import ClassVar

from piper.errors import RunError
from piper.ops.base import (
    Communicator,
    Device,
    Handle,
    Instruction,
    Message,
    Site,
    Tensor,
    Work,
    instruction,
    work,
)
from piper.ops.bucket import BucketCollective, Collect


@work
class AllToAll(Work, frozen=True):
    """Every member gets the tokens of its experts: with n members, ``[E, C, …]`` becomes ``[E/n, n·C, …]`` on each; ``back``: the inverse.

    ``sizes`` are the sizes of the whole tensor on one member once dimensions that are merged are taken apart (-1: the tokens'), in
    which ``expert_dim`` and ``token_dim`` are the experts' and the tokens' positions.
    """

    sizes: tuple[int, ...]
    expert_dim: int
    token_dim: int
    back: bool = False

    def lower(self, site: Site) -> Instruction:
        return ExchangeExperts.at(
            site,
            sizes=self.sizes,
            expert_dim=self.expert_dim,
            token_dim=self.token_dim,
            back=self.back,
        )


@work
class AllToAllCounts(Work, frozen=True):
    """The members tell each other how many tokens they have for each expert.

    Input: ``counts[E]`` (int64). Outputs, on each of n members: ``[n, E/n]``, by sender the counts for the member's experts, and
    ``[E/n]``, its sum over the senders.
    """

    def lower(self, site: Site) -> Instruction:
        return ExchangeCounts.at(site)


@work
class AllToAllRows(Work, frozen=True):
    """Every member gets the rows of its experts, however many: ``[N, …]``, sorted by expert, becomes ``[bound, …]``, sorted by expert, then
    by sender, with zeros at the end; ``back``: the inverse.

    With ``complete`` it is an error if the counts are of fewer than all rows (those behind come back as zeros). Inputs: the rows, the
    member's own counts ``[E]``, and what :class:`AllToAllCounts` made of them, ``[n, E/n]``. The receiving shape is
    the memory bound: more rows than it has are an error.
    """

    back: bool = False
    complete: bool = False

    def lower(self, site: Site) -> Instruction:
        return ExchangeRows.at(site, back=self.back, complete=self.complete)


@instruction
class ExchangeExperts(BucketCollective, frozen=True, kw_only=True):
    """Send each member its experts' part of a tensor (``back``: the tokens that came from it)."""

    role: ClassVar[str] = "all_to_all"

    sizes: tuple[int, ...]
    expert_dim: int
    token_dim: int
    back: bool = False

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        (tensor,), (message,) = tensors, self.messages
        count, experts = len(self.members), self.sizes[self.expert_dim]
        local = list(self.sizes)
        local[self.expert_dim] = experts // count
        part = tuple(local)
        cut, joined = self.dims
        sizes = part if self.back else self.sizes
        share = message.numel // count
        equal = [share] * count
        if joined == 0:
            # What arrives is the result as it lies.
            flat = device.split_parts(tensor, sizes, cut, count)
            out = device.empty(message.numel, message.dtype)
            handle = communicator.all_to_all(out, flat, equal, equal)
            return handle, lambda: device.unflatten(out, (message.shape,))
        # A member's own part goes no way: it is joined from where it was packed.
        me = communicator.rank
        equal[me] = 0
        packed = device.split_parts(tensor, sizes, cut, count, last=me)
        flat, own = device.unflatten(packed, (((count - 1) * share,), (share,)))
        out = device.empty((count - 1) * share, message.dtype)
        handle = communicator.all_to_all(out, flat, equal, equal)

        def collect() -> Sequence[Tensor]:
            arrived = list(device.unflatten(out, ((share,),) * (count - 1)))
            arrived.insert(me, own)
            return (device.join_parts(arrived, part, joined, message.shape),)

        return handle, collect

    @property
    def dims(self) -> tuple[int, int]:
        """The dimensions along which a tensor is cut into parts and along which those that arrive are joined."""
        both = self.expert_dim, self.token_dim
        return both[::-1] if self.back else both


@instruction
class ExchangeCounts(BucketCollective, frozen=True, kw_only=True):
    """Exchange the numbers of tokens per expert."""

    role: ClassVar[str] = "all_to_all_counts"

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        matrix, _ = self.messages
        count, mine = matrix.shape
        flat = device.flatten(tensors, ((count * mine,),))
        out = device.empty(count * mine, matrix.dtype)
        handle = communicator.all_to_all(out, flat, (mine,) * count, (mine,) * count)

        def collect() -> Sequence[Tensor]:
            (received,) = device.unflatten(out, (matrix.shape,))
            return received, device.sum_rows(received)

        return handle, collect


@instruction
class ExchangeRows(BucketCollective, frozen=True, kw_only=True):
    """Send each member its experts' rows (``back``: the rows that came from it). Inputs: rows, own counts, counts by sender.

    Waits for the counts, which say how much to send and to receive. Raises :class:`RunError` for more rows than there is room for.
    """

    role: ClassVar[str] = "all_to_all_rows"

    back: bool = False
    complete: bool = False

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        rows, own, by_sender = tensors
        (message,) = self.messages
        count = len(self.members)
        counts = device.numbers(own)
        mine = len(counts) // count
        numbers = device.numbers(by_sender)
        received = [numbers[i : i + mine] for i in range(0, len(numbers), mine)]
        outwards = [sum(counts[i : i + mine]) for i in range(0, len(counts), mine)]
        inwards = [sum(each) for each in received]
        width = _width(message)
        if self.complete and sum(counts) != message.shape[0]:
            raise RunError(
                f"the counts are of {sum(counts)} of {message.shape[0]} rows; what the region makes of the others is not known to be zero "
                "(it adds something to them, for instance): do that outside of the region, or give every row an expert"
            )
        if self.back:
            flat = device.rows_by_sender(rows, received)
            given, taken = inwards, outwards
        else:
            self._check_room(sum(inwards), message.shape[0])
            flat = device.first_rows(rows, sum(outwards))
            given, taken = outwards, inwards
        out = device.empty(sum(taken) * width, message.dtype)
        handle = communicator.all_to_all(
            out, flat, [n * width for n in taken], [n * width for n in given]
        )
        if self.back:
            return handle, lambda: (device.padded_rows(out, message.shape),)
        return handle, lambda: (device.rows_by_expert(out, received, message.shape),)

    def _check_room(self, found: int, room: int) -> None:
        if found <= room:
            return
        raise RunError(
            f"the experts of device group {list(self.members)} received {found} tokens on one device, {found - room} more than the {room} "
            "that there is room for; raise capacity_factor of the Shard, or leave it out (room for all tokens of the group)"
        )


def _width(message: Message) -> int:
    """Elements of one row."""
    return message.numel // message.shape[0] if message.shape[0] else 1
