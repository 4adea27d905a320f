"""Exchange the experts' tokens within a group, some or all of whose members hold the experts in
equal parts and some or all of which have tokens for them.
"""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from piper.errors import RunError
from piper.ops.base import (
    Communicator,
    Device,
    Handle,
    Instruction,
    Message,
    NodeShape,
    Rendezvous,
    Site,
    Tensor,
    Work,
    instruction,
    work,
)
from piper.ops.bucket import BucketCollective, Collect
from piper.ops.storage import Flight, Storages


class Ends(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The positions, ascending, of a group's members that hold the parts of the experts, in order,
    and of those that have tokens.
    """

    holders: tuple[int, ...]
    sources: tuple[int, ...]


def _end_flaws(ends: Ends, members: int) -> list[str]:
    """Which ends there cannot be in a group of so many *members*."""
    return [
        f"{name}: expected different positions, ascending, among {members} members, found {found!r:.80}"
        for name, found in (("holders", ends.holders), ("sources", ends.sources))
        if not found
        or list(found) != sorted(set(found))
        or not 0 <= found[0] <= found[-1] < members
    ]


class _Exchange(Work, frozen=True):
    """``ends`` says who holds experts and who has tokens (``None``: every member does both)."""

    ends: Ends | None = None
    back: bool = False

    def flaws(self, node: NodeShape) -> list[str]:
        if self.ends is None:
            return []
        return [text for group in node.groups for text in _end_flaws(self.ends, len(group))]

    def delivers(self, position: int) -> bool:
        if self.ends is None:
            return True
        return position in (self.ends.sources if self.back else self.ends.holders)


@work
class AllToAll(_Exchange, frozen=True, kw_only=True):
    """Every holder gets the tokens of its experts: with n holders and s sources, ``[E, C, …]`` on
    each source becomes ``[E/n, s·C, …]`` on each holder; ``back``: the inverse.

    ``sizes`` are the sizes of the whole tensor on one source once dimensions that are merged are
    taken apart (-1: the tokens'), in which ``expert_dim`` and ``token_dim`` are the experts' and
    the tokens' positions.
    """

    sizes: tuple[int, ...]
    expert_dim: int
    token_dim: int

    def lower(self, site: Site) -> Instruction:
        return ExchangeExperts.at(
            site,
            sizes=self.sizes,
            expert_dim=self.expert_dim,
            token_dim=self.token_dim,
            ends=self.ends,
            back=self.back,
        )


@work
class AllToAllCounts(_Exchange, frozen=True):
    """The sources tell the holders how many tokens they have for each expert.

    Input, on each of s sources: ``counts[E]`` (int64). Outputs, on each of n holders: ``[s, E/n]``,
    by sender the counts for the holder's experts, and ``[E/n]``, its sum over the senders. There is
    no way back.
    """

    def lower(self, site: Site) -> Instruction:
        return ExchangeCounts.at(site, ends=self.ends)


@work
class AllToAllRows(_Exchange, frozen=True):
    """Every holder gets the rows of its experts, however many: ``[N, …]``, sorted by expert,
    becomes ``[bound, …]``, sorted by expert, then by sender, with zeros at the end; ``back``: the
    inverse.

    With ``complete`` it is an error if the counts are of fewer than all rows (those behind come
    back as zeros). Inputs: the rows, the sources' own counts ``[E]``, and what
    :class:`AllToAllCounts` made of them on the holders, ``[s, E/n]``. The receiving shape is the
    memory bound: more rows than it has are an error.
    """

    complete: bool = False

    def lower(self, site: Site) -> Instruction:
        return ExchangeRows.at(site, ends=self.ends, back=self.back, complete=self.complete)


class _ExchangeInstruction(BucketCollective, frozen=True, kw_only=True):
    """An exchange as one member takes part in it."""

    ends: Ends | None = None
    back: bool = False

    def flaws(self) -> Sequence[str]:
        return () if self.ends is None else _end_flaws(self.ends, len(self.members))

    @property
    def holders(self) -> Sequence[int]:
        """The members that hold experts, in order of their parts."""
        return range(len(self.members)) if self.ends is None else self.ends.holders

    @property
    def sources(self) -> Sequence[int]:
        """The members that have tokens."""
        return range(len(self.members)) if self.ends is None else self.ends.sources

    def rendezvous(self) -> Rendezvous:
        meeting = super().rendezvous()
        if self.ends is None:
            return meeting
        # A message is what one receiver gets of all senders; a sender has such a share for every
        # receiver.
        senders, receivers = len(self.ends.sources), len(self.ends.holders)
        if self.back:
            senders, receivers = receivers, senders
        return replace(meeting, busiest=meeting.nbytes * max(senders, receivers) // senders)

    def fly(self, memory: Storages) -> Flight:
        """A copy of what is sent, what is received, and the results, which are made of it."""
        sent, received = (memory.new(nbytes) for nbytes in self._exchanged(memory))
        made = tuple((slot, memory.new(memory.nbytes(slot))) for slot in self.outputs)
        return Flight((sent, received), made)

    def _exchanged(self, memory: Storages) -> tuple[int, int]:
        """At most the bytes that the member sends and receives."""
        if self.ends is None:
            return self.messages[0].nbytes, self.messages[0].nbytes
        position = self.members.index(memory.device)
        senders = self.ends.holders if self.back else self.ends.sources
        sent = memory.nbytes(self.inputs[0]) if position in senders else 0
        return sent, memory.nbytes(self.outputs[0]) if self.outputs else 0

    def swap(
        self,
        communicator: Communicator,
        out: Tensor,
        flat: Tensor,
        taken: Sequence[int],
        given: Sequence[int],
    ) -> Handle:
        """Send ``given[i]`` elements of *flat* to receiver number i, receive ``taken[j]`` from
        sender number j (either is empty on a member that does not send, or not receive).
        """
        senders, receivers = (
            (self.holders, self.sources) if self.back else (self.sources, self.holders)
        )
        splits = [[0] * len(self.members), [0] * len(self.members)]
        for mine, positions, numbers in ((0, senders, taken), (1, receivers, given)):
            for position, number in zip(positions, numbers, strict=bool(numbers)):
                splits[mine][position] = number
        return communicator.all_to_all(out, flat, *splits)


@instruction
class ExchangeExperts(_ExchangeInstruction, frozen=True, kw_only=True):
    """Send each holder its experts' part of a tensor (``back``: each source the tokens that came
    from it).
    """

    role: ClassVar[str] = "all_to_all"

    sizes: tuple[int, ...]
    expert_dim: int
    token_dim: int

    def fly(self, memory: Storages) -> Flight:
        """Where all members do both: a copy of what is sent; what is received, which is the result,
        or is put together with the device's own part of the copy.
        """
        if self.ends is not None:
            return super().fly(memory)
        nbytes, count = self.messages[0].nbytes, len(self.members)
        (slot,), (_, joined) = self.outputs, self.dims
        sent, result = memory.new(nbytes), memory.new(nbytes)
        received = result if joined == 0 else memory.new(nbytes // count * (count - 1))
        return Flight((sent, received), ((slot, result),))

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        if self.ends is not None:
            return self._start_between(device, communicator, tensors)
        (tensor,), (message,) = tensors, self.messages
        cut, joined = self.dims
        count, part = len(self.members), self._part
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

    def _start_between(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        """Where some members only hold experts, or only have tokens."""
        (message,) = self.messages
        cut, joined = self.dims
        receivers, senders = len(self.holders), len(self.sources)
        if self.back:
            receivers, senders = senders, receivers
        share, part = message.numel // senders, self._part
        out = device.empty(message.numel if self.outputs else 0, message.dtype)
        flat = device.empty(0, message.dtype)
        if tensors:
            sizes = part if self.back else self.sizes
            flat = device.split_parts(tensors[0], sizes, cut, receivers)
        taken = [share] * senders if self.outputs else []
        given = [share] * receivers if tensors else []
        handle = self.swap(communicator, out, flat, taken, given)
        if not self.outputs:
            return handle, tuple

        def collect() -> Sequence[Tensor]:
            arrived = device.unflatten(out, ((share,),) * senders)
            return (device.join_parts(arrived, part, joined, message.shape),)

        return handle, collect

    @property
    def dims(self) -> tuple[int, int]:
        """The dimensions along which a tensor is cut into parts and along which those that arrive
        are joined.
        """
        both = self.expert_dim, self.token_dim
        return both[::-1] if self.back else both

    @property
    def _part(self) -> tuple[int, ...]:
        """The sizes of what one holder has of one source."""
        local = list(self.sizes)
        local[self.expert_dim] //= len(self.holders)
        return tuple(local)


@instruction
class ExchangeCounts(_ExchangeInstruction, frozen=True, kw_only=True):
    """Exchange the numbers of tokens per expert."""

    role: ClassVar[str] = "all_to_all_counts"

    def fly(self, memory: Storages) -> Flight:
        """The matrix is what was received."""
        flight = super().fly(memory)
        if not flight.fills:
            return flight
        (matrix, _), *rest = flight.fills
        return flight._replace(fills=((matrix, flight.keeps[1]), *rest))

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        matrix, _ = self.messages
        senders, mine = matrix.shape
        receivers = len(self.holders)
        flat = device.empty(0, matrix.dtype)
        if tensors:
            flat = device.flatten(tensors, ((receivers * mine,),))
        out = device.empty(matrix.numel if self.outputs else 0, matrix.dtype)
        taken = [mine] * senders if self.outputs else []
        given = [mine] * receivers if tensors else []
        handle = self.swap(communicator, out, flat, taken, given)
        if not self.outputs:
            return handle, tuple

        def collect() -> Sequence[Tensor]:
            (received,) = device.unflatten(out, (matrix.shape,))
            return received, device.sum_rows(received)

        return handle, collect


@instruction
class ExchangeRows(_ExchangeInstruction, frozen=True, kw_only=True):
    """Send each holder its experts' rows (``back``: each source the rows that came from it).
    Inputs: on who sends the rows, on sources their own counts, on holders the counts by sender.

    Waits for the counts, which say how much to send and to receive. Raises :class:`RunError` for
    more rows than there is room for.
    """

    role: ClassVar[str] = "all_to_all_rows"

    complete: bool = False

    def _exchanged(self, memory: Storages) -> tuple[int, int]:
        """How many rows are sent and received depends on the data: at most as many as the larger
        side has room for.
        """
        if self.ends is not None:
            return super()._exchanged(memory)
        largest = max(self.messages[0].nbytes, memory.nbytes(self.inputs[0]))
        return largest, largest

    def start(
        self, device: Device, communicator: Communicator, tensors: Sequence[Tensor]
    ) -> tuple[Handle, Collect]:
        (message,) = self.messages
        holds, has_tokens = communicator.rank in self.holders, communicator.rank in self.sources
        left = list(tensors)
        rows = left.pop(0) if (holds if self.back else has_tokens) else None
        counts = device.numbers(left.pop(0)) if has_tokens else []
        numbers = device.numbers(left.pop(0)) if holds else []
        outwards = _sums(counts, len(self.holders))
        received = _cut(numbers, len(self.sources))
        inwards = [sum(each) for each in received]
        width = _width(message)
        if self.complete and has_tokens and sum(counts) != message.shape[0]:
            raise RunError(
                f"the counts are of {sum(counts)} of {message.shape[0]} rows; what the region makes of the others is not known to be zero "
                "(it adds something to them, for instance): do that outside of the region, or give every row an expert"
            )
        flat = device.empty(0, message.dtype)
        if self.back:
            if rows is not None:
                flat = device.rows_by_sender(rows, received)
            given, taken = inwards, outwards
        else:
            self._check_room(sum(inwards), message.shape[0])
            if rows is not None:
                flat = device.first_rows(rows, sum(outwards))
            given, taken = outwards, inwards
        out = device.empty(sum(taken) * width, message.dtype)
        handle = self.swap(
            communicator, out, flat, [n * width for n in taken], [n * width for n in given]
        )
        if not self.outputs:
            return handle, tuple
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


def _cut(numbers: list[int], count: int) -> list[list[int]]:
    """*numbers* in *count* equal runs; none of none."""
    each = len(numbers) // count
    return [numbers[i : i + each] for i in range(0, len(numbers), each)] if numbers else []


def _sums(numbers: list[int], count: int) -> list[int]:
    return [sum(run) for run in _cut(numbers, count)]


def _width(message: Message) -> int:
    """Elements of one row."""
    return message.numel // message.shape[0] if message.shape[0] else 1
