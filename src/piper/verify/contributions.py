"""Every gradient contribution is summed exactly once before the update that uses it, every copy is updated once, and the
norm that gradients are clipped by counts each gradient once.

The plan is executed with symbols for numbers. A contribution is (the DAG value, the device that made it). A sum is
the multiset of its contributions, written as one integer with eight bits per contribution: adding sums adds
integers. Beside it goes a digest of how the sum was made, because two copies of a parameter stay bitwise equal only
if their gradients were added up in the same way.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from piper.ids import DeviceId, Slot, ValueId
from piper.ir.dag import Dag, GradientUse, LossKind, Role
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.base import Instruction, ReduceOp
from piper.ops.grad_norm import CombineParts, FinishNorm, MeasureGradients
from piper.ops.keep import AddKeptGradients, KeepGradients
from piper.ops.product import Multiply
from piper.ops.round_masters import StoreRounded
from piper.ops.update import OptimizerStep
from piper.plan.roles import Roles
from piper.verify.deadlock import Place
from piper.verify.fidelity import delivered_to
from piper.verify.keeping import Keeping, kept_by, kept_counts
from piper.verify.norms import Norms
from piper.verify.symbolic import WHOLE, Total
from piper.verify.trace import Problem, Subject, describe_value

CHECK = "contributions"

_WEIGHT = ""
"""What the sum of loss weights is a sum for; no parameter has this name."""


def check_contributions(
    subject: Subject, completed: Sequence[tuple[Place, ...]]
) -> Iterator[Problem]:
    """Problems. *completed* is the order of a complete execution, members of one rendezvous together."""
    for text in _Symbolic(subject).run(completed):
        yield Problem(CHECK, text)


class _Origins:
    """The identities of all contributions: a digit per contributing value and device.

    ``full`` says, by parameter and part of its experts (``WHOLE`` where they are not sharded), what all of them are together.
    """

    def __init__(self, dag: Dag) -> None:
        self.digits: dict[ValueId, tuple[str, int, tuple[DeviceId, ...]]] = {}
        self.full: dict[tuple[str, int], int] = {}
        self._sizes: dict[str, int] = {}
        self._part: dict[tuple[str, int], int] = {}
        self._values: dict[str, list[ValueId]] = {}
        self._starts: dict[str, list[int]] = {}
        self._indices: dict[tuple[DeviceId, ...], dict[DeviceId, int]] = {}
        sums: list[tuple[str, Iterable[ValueId]]] = [(_WEIGHT, dag.weights)]
        sums += dag.contributions.items()
        for name, values in sums:
            count = 0
            self._values[name], self._starts[name] = list(values), []
            for value in values:
                devices = delivered_to(dag.nodes[dag.producers[value]])
                self.digits[value] = (name, count, devices)
                self._starts[name].append(count)
                count += len(devices)
                if devices not in self._indices:
                    self._indices[devices] = {device: i for i, device in enumerate(devices)}
            self._sizes[name] = count
            groups = dag.expert_groups.get(name, ())
            self._part.update({(name, d): i for group in groups for i, d in enumerate(group)})
            self.full[name, WHOLE] = int.from_bytes(b"\x01" * count, "little")
            if groups:
                self.full.update(self._full_parts(name, count))

    def _full_parts(self, name: str, count: int) -> dict[tuple[str, int], int]:
        """What all contributions to each part of the experts are together, of *count* contributions to all."""
        digits: dict[int, bytearray] = {}
        for digit in range(count):
            _, device = self._owner(name, digit)
            digits.setdefault(self.part(name, device), bytearray(count))[digit] = 1
        return {(name, part): int.from_bytes(ones, "little") for part, ones in digits.items()}

    def part(self, name: str, device: int) -> int:
        """The part of a parameter's experts that *device* holds."""
        return self._part.get((name, device), WHOLE)

    def total(self, value: ValueId, device: DeviceId) -> Total:
        """The sum of one contribution."""
        name, base, devices = self.digits[value]
        digit = base + self._indices[devices][device]
        return Total(name, 1 << (8 * digit), hash((name, digit)), part=self.part(name, device))

    def images(
        self, total: Total, renamings: Sequence[Callable[[DeviceId], DeviceId]]
    ) -> list[Total]:
        """What *total* is on other devices of its role, whose symmetries are *renamings* (of a folded plan)."""
        counts = total.counts.to_bytes((total.counts.bit_length() + 7) // 8, "little")
        digits = [(found.start(), counts[found.start()]) for found in _DIGITS.finditer(counts)]
        owners = [(self._owner(total.name, digit), count) for digit, count in digits]
        size = self._sizes[total.name]
        images: list[Total] = []
        for number, renamed in enumerate(renamings):
            moved = [
                (self.digits[value][1] + self._indices[self.digits[value][2]][renamed(device)], n)
                for (value, device), n in owners
            ]
            history = hash((total.history, number))
            counted = _number(moved, size)
            part = self.part(total.name, renamed(owners[0][0][1])) if owners else total.part
            kept = sum(
                n * kept_by(renamed(device)) for device, n in kept_counts(total.kept).items()
            )
            images.append(replace(total, counts=counted, history=history, kept=kept, part=part))
        return images

    def _owner(self, name: str, digit: int) -> tuple[ValueId, DeviceId]:
        """The value and the device that a digit stands for."""
        starts = self._starts[name]
        index = bisect_right(starts, digit) - 1
        value = self._values[name][index]
        return value, self.digits[value][2][digit - starts[index]]

    def difference(self, dag: Dag, total: Total) -> str:
        """Which contributions *total* lacks or has more than once."""
        size = self._sizes[total.name]
        counts = total.counts.to_bytes(max(size, (total.counts.bit_length() + 7) // 8), "little")
        wrong = [
            (digit, count)
            for digit, count in enumerate(counts[:size])
            if count != 1
            and (count or self.part(total.name, self._owner(total.name, digit)[1]) == total.part)
        ]
        lines: list[str] = []
        for digit, count in wrong[:8]:
            value, device = self._owner(total.name, digit)
            many = "missing" if count == 0 else f"{count} times"
            lines.append(f"    {many}: {describe_value(dag, value)} from device {device}")
        return "\n".join(lines + ([f"    … {len(wrong) - 8} more"] if len(wrong) > 8 else []))


_DIGITS = re.compile(rb"[^\0]")


def _number(digits: Sequence[tuple[int, int]], size: int) -> int:
    """The integer with these digits, by place, of *size* bytes."""
    if (
        len(digits) <= 4
    ):  # large numbers that are almost all zeros: filling in all of them takes longer
        return sum(digit << (8 * place) for place, digit in digits)
    filled = bytearray(size)
    for place, digit in digits:
        filled[place] = digit
    return int.from_bytes(filled, "little")


_Columns: TypeAlias = list[list[Total | None]]
"""The totals that each member of a rendezvous gives, or gets."""


class _Symbolic:
    """The symbolic execution."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.origins = _Origins(subject.dag)
        self.totals: list[dict[Slot, Total]] = [{} for _ in subject.traces]
        self.updated: dict[
            str, dict[int, tuple[int, int, tuple[int, int]]]
        ] = {}  # name → device → position, history, part of the experts and slice
        self.refreshed: dict[str, set[int]] = {}  # name → devices whose whole copy was remade
        self.keeping = Keeping(subject.dag)
        self.norms = Norms(subject, self.totals, self.complete)

    def run(self, completed: Sequence[tuple[Place, ...]]) -> Iterator[str]:
        digits = self.origins.digits
        traces = self.subject.traces
        kinds: Mapping[type, Callable[[int, int], Iterator[str]]] = {
            Accumulate: self.accumulate,
            OptimizerStep: self.update,
            KeepGradients: self.keep,
            AddKeptGradients: self.keep,
            MeasureGradients: self.measure,
            CombineParts: self.norms.combine,
            FinishNorm: self.norms.finish,
            Multiply: self.multiply,
            StoreRounded: self.round,
        }
        for places in completed:
            device, i = places[0]
            trace = traces[device]
            if trace.meetings[i] is not None:
                yield from self.meet(places)
                continue
            if (kind := kinds.get(type(trace.instructions[i]))) is not None:
                yield from kind(device, i)
                continue
            for slot in trace.writes[i]:
                value = trace.values[slot]
                if value in digits:
                    self.totals[device][slot] = self.origins.total(value, trace.device)
        if self.subject.dag.gradient_use is GradientUse.KEEP:
            yield from self.kept()
        else:
            yield from self.copies()

    def accumulate(self, device: int, i: int) -> Iterator[str]:
        """Add, per total."""
        instruction = self.subject.traces[device].instructions[i]
        assert isinstance(instruction, Accumulate)
        totals = self.totals[device]
        for slot, left, right in zip(
            instruction.totals, instruction.left, instruction.right, strict=True
        ):
            one, two = totals.get(left), totals.get(right)
            if one is None or two is None or _kind(one) != _kind(two):
                yield (
                    f"{self.subject.at(device, i)}: {self.subject.slot(device, left)} and "
                    f"{self.subject.slot(device, right)} are not contributions to one sum"
                )
                continue
            totals[slot] = one.plus(two)

    def meet(self, places: Sequence[Place]) -> Iterator[str]:
        """What each member of a rendezvous gets."""
        device, first = places[0]
        meeting = self.subject.traces[device].meetings[first]
        assert meeting is not None
        at = dict(places)
        if self.norms.concerned(places):
            yield from self.norms.meet(places)
            return
        given = self.given(meeting.members, at)
        if meeting.role == "refresh":
            yield from self.refresh(places)
            return
        if given is None:
            yield f"{self.subject.at(device, first)}: meets devices that no member stands for; plan without folding"
            return
        if all(total is None for totals in given for total in totals):
            return
        instruction = self.subject.traces[device].instructions[first]
        kind = _MEETINGS.get(meeting.role)
        if kind is None or not _is_sum(instruction):
            yield f"{self.subject.at(device, first)}: does not pass on sums of contributions"
            return
        results = kind(given)
        if results is None:
            yield (
                f"{self.subject.at(device, first)}: the members do not contribute parts of the same "
                f"sums: {[[t and t.name for t in totals] for totals in given]}"
            )
            return
        for place, position in places:
            writes = self.subject.traces[place].writes[position]
            mine = results[meeting.members.index(place)]
            self.totals[place].update(
                {s: t for s, t in zip(writes, mine, strict=False) if t is not None}
            )

    def given(self, members: Sequence[DeviceId], at: Mapping[int, int]) -> _Columns | None:
        """The totals that each member of a rendezvous gives: of a device without a program, the images of those of the one that
        stands for it. ``None`` if that one takes no part. *at* are the positions in the programs.
        """
        traces, roles = self.subject.traces, self.subject.roles
        mine = {d: [self.totals[d].get(s) for s in traces[d].reads[i]] for d, i in at.items()}
        if roles is None or len(at) == len(members):
            return [mine[member] for member in members]
        others: dict[int, list[DeviceId]] = {}
        for member in members:
            if member not in at:
                others.setdefault(roles.first(member), []).append(member)
        if not others.keys() <= mine.keys():
            return None
        columns: dict[int, list[Total | None]] = dict(mine)
        for first, devices in others.items():
            images = [self._images(total, devices, roles) for total in mine[first]]
            for number, device in enumerate(devices):
                columns[device] = [image[number] for image in images]
        return [columns[member] for member in members]

    def _images(
        self, total: Total | None, devices: Sequence[DeviceId], roles: Roles
    ) -> Sequence[Total | None]:
        if total is None:
            return [None] * len(devices)
        renamings = [partial(roles.moved, to=device) for device in devices]
        images = self.origins.images(total, renamings)
        if total.shard == WHOLE:
            return images
        shards = [self.slice_on(device, total.name) for device in devices]
        return [replace(image, shard=shard) for image, shard in zip(images, shards, strict=True)]

    def refresh(self, places: Sequence[Place]) -> Iterator[str]:
        """Whole parameters are remade of slices: all of these must have been updated."""
        for device, i in places:
            yield from self.round(device, i)

    def round(self, device: int, i: int) -> Iterator[str]:
        """Whole parameters are remade of slices or master copies: what this device holds of these must have been updated."""
        slots = self.subject.plan.devices[device].slots
        for slot in self.subject.traces[device].writes[i]:
            name = slots[slot].name
            if device not in self.updated.get(name, {}):
                yield f"{self.subject.at(device, i)}: the slice of {name!r} was not updated before"
            self.refreshed.setdefault(name, set()).add(device)

    def multiply(self, device: int, i: int) -> Iterator[str]:
        """The total weight is multiplied by the scale of the loss."""
        subject, totals = self.subject, self.totals[device]
        instruction = subject.traces[device].instructions[i]
        assert isinstance(instruction, Multiply)
        weight = totals.get(instruction.left)
        role = subject.plan.devices[device].slots[instruction.right].role
        if weight is None or weight.name != _WEIGHT or weight.scaled or role is not Role.SCALE:
            yield f"{subject.at(device, i)}: does not multiply the loss weight by the scale of the loss"
            return
        totals[instruction.product] = replace(weight, scaled=True)

    def update(self, device: int, i: int) -> Iterator[str]:
        """Compare the sums that an update uses with what they should be."""
        subject = self.subject
        instruction = subject.traces[device].instructions[i]
        assert isinstance(instruction, OptimizerStep)
        here = subject.at(device, i)
        if subject.dag.gradient_use is GradientUse.KEEP:
            yield f"{here}: nothing is updated in a step that keeps its gradients"
        yield from self.divided(device, i, instruction.gradients, instruction.scale)
        yield from self.norms.clips(device, i, instruction)
        used = tuple(s for s in (instruction.scale, instruction.grad_norm) if s is not None)
        for name, parameter, slot in zip(
            instruction.names, instruction.parameters, instruction.gradients, strict=True
        ):
            total = self.totals[device].get(slot)
            key = (name, self.origins.part(name, device))
            if total is None or total.target != key or not self.complete(total):
                yield self.wrong(here, device, slot, name, total)
                continue
            info = subject.plan.devices[device].slots[parameter]
            shard = WHOLE if info.shard is None or info.shard[1] == 1 else info.shard[0]
            if total.shard != shard:
                yield f"{here}: slice {shard} of {name!r} is updated from slice {total.shard} of its gradient"
            yield from self.used(device, i, name, total, used)

    def used(
        self, device: int, i: int, name: str, total: Total, scalars: Sequence[Slot]
    ) -> Iterator[str]:
        """Note that a gradient is used, for an update or to be kept, together with *scalars*."""
        done = self.updated.setdefault(name, {})
        if device in done:
            what = "kept" if self.subject.dag.gradient_use is GradientUse.KEEP else "updated"
            yield f"{self.subject.at(device, i)}: parameter {name!r} was {what} already by #{done[device][0]}"
        totals, norms = self.totals[device], self.norms.at(device)
        found = [totals.get(s) or norms.get(s) for s in scalars]
        ways = tuple(v.history for v in found if v is not None)
        done[device] = (i, hash((total.history, ways)), (total.part, total.shard))

    def divided(
        self, device: int, i: int, gradients: Sequence[Slot], scale: Slot | None
    ) -> Iterator[str]:
        """What is wrong with the scalar that *gradients* are divided by, before anything is made of them: the total weight of a weighted loss,
        the scale of a scaled one, or both.

        Once what was kept is in them, they were divided before.
        """
        here, found = self.subject.at(device, i), self.totals[device]
        final = [t.final for s in gradients if (t := found.get(s)) is not None]
        if any(final) and not all(final):
            yield f"{here}: only some of the gradients contain what was kept"
        dag = self.subject.dag
        weighted = dag.loss_kind is LossKind.WEIGHTED
        divided = (weighted or dag.loss_scaled) and not any(final)
        if (scale is not None) != divided:
            yield (
                f"{here}: gradients must be divided by the total loss weight exactly once, when "
                f"the loss is weighted, and by its scale, when it is scaled; this loss is {dag.loss_kind.value}"
                f"{' and scaled' if dag.loss_scaled else ''}"
            )
        elif scale is not None and not weighted:
            if self.subject.plan.devices[device].slots[scale].role is not Role.SCALE:
                yield f"{here}: {self.subject.slot(device, scale)} is not the scale of the loss"
        elif scale is not None:
            weight = found.get(scale)
            if weight is None or (weight.name, weight.counts) != (
                _WEIGHT,
                self.origins.full[_WEIGHT, WHOLE],
            ):
                yield self.wrong(here, device, scale, _WEIGHT, weight)
            elif weight.scaled != dag.loss_scaled:
                yield f"{here}: {self.subject.slot(device, scale)} should {'' if dag.loss_scaled else 'not '}contain the scale of the loss"
        adding = self.subject.dag.gradient_use is GradientUse.ADD
        instruction = self.subject.traces[device].instructions[i]
        if adding and not all(final) and not isinstance(instruction, AddKeptGradients):
            yield f"{here}: what was kept from earlier steps is not in the gradients"

    def keep(self, device: int, i: int) -> Iterator[str]:
        """Sums are added to what is kept, or what is kept is added to them."""
        subject = self.subject
        instruction = subject.traces[device].instructions[i]
        assert isinstance(instruction, (KeepGradients, AddKeptGradients))
        here, totals = subject.at(device, i), self.totals[device]
        adding = isinstance(instruction, AddKeptGradients)
        wanted = GradientUse.ADD if adding else GradientUse.KEEP
        if subject.dag.gradient_use is not wanted:
            yield f"{here}: the gradients of this step are to {subject.dag.gradient_use.value}"
        yield from self.divided(device, i, instruction.gradients, instruction.scale)
        scale = () if instruction.scale is None else (instruction.scale,)
        slots = subject.plan.devices[device].slots
        for k, (name, slot) in enumerate(
            zip(instruction.names, instruction.gradients, strict=True)
        ):
            total = totals.get(slot)
            if total is None or total.target != (name, self.origins.part(name, device)):
                yield self.wrong(here, device, slot, name, total)
                continue
            if slots[instruction.kept[k]].name != name or total.final:
                yield f"{here}: {subject.slot(device, instruction.kept[k])} is not what is kept of {name!r}"
            if total.shard != self.keeping.slice(name, device):
                wanted_slice, found = (
                    "all" if k == WHOLE else f"slice {k}"
                    for k in (self.keeping.slice(name, device), total.shard)
                )
                yield f"{here}: {wanted_slice} of the gradient of {name!r} is kept here, found {found}"
            if isinstance(instruction, AddKeptGradients):
                histories = tuple(totals[s].history for s in scale if s in totals)
                history = hash((total.history, histories))
                kept = total.kept + kept_by(device)
                totals[instruction.totals[k]] = replace(total, history=history, kept=kept)
            else:
                yield from self.used(device, i, name, total, scale)
                for share in (total, *self.elsewhere(device, total)):
                    self.keeping.keep(share)

    def elsewhere(self, device: int, total: Total) -> Iterable[Total]:
        """What *total* is on the devices for which *device* stands, if the plan is folded."""
        if (roles := self.subject.roles) is None:
            return ()
        others = next((role[1:] for role in roles.roles if role[0] == device), ())
        return [image for image in self._images(total, others, roles) if image is not None]

    def measure(self, device: int, i: int) -> Iterator[str]:
        """Gradients are measured as they will be used."""
        instruction = self.subject.traces[device].instructions[i]
        assert isinstance(instruction, MeasureGradients)
        yield from self.divided(device, i, instruction.gradients, instruction.scale)
        yield from self.norms.measure(device, i)

    def slice_on(self, device: int, name: str) -> int:
        """Which slice of a parameter *device* holds; ``WHOLE`` for one that is not sharded."""
        groups = [g for g in self.subject.dag.shards.get(name, ()) if len(g) > 1]
        return next((g.index(DeviceId(device)) for g in groups if device in g), WHOLE)

    def wrong(self, here: str, device: int, slot: Slot, name: str, total: Total | None) -> str:
        """What is wrong with the sum in *slot*."""
        wanted = f"the gradient of {name!r}" if name else "the total loss weight"
        found = f"{here}: {self.subject.slot(device, slot)} should be {wanted}"
        if total is None:
            return f"{found}, but is no sum of contributions"
        if total.name != name:
            return f"{found}, but is a sum for {total.name or 'the loss weight'!r}"
        lines = [self.origins.difference(self.subject.dag, total), *self.keeping.difference(total)]
        return f"{found}, but\n" + "\n".join(line for line in lines if line)

    def complete(self, total: Total) -> bool:
        """Whether *total* is a whole gradient, or a slice of one: all contributions once, and what every device kept."""
        full = self.origins.full.get(total.target)
        return total.counts == full and total.kept == self.keeping.wanted(total)

    def kept(self) -> Iterator[str]:
        """What all devices keep of each gradient is together all contributions to it."""
        for total in self.keeping.not_kept(self.origins.full):
            which = "" if total.shard == WHOLE else f" slice {total.shard}"
            difference = self.origins.difference(self.subject.dag, total)
            yield f"what devices keep of the gradient of {total.name!r}{which} should be all of it together, but\n{difference}"

    def copies(self) -> Iterator[str]:
        """The gradient of each copy of a parameter that has contributions is used, all in the same way."""
        contributions = self.subject.dag.contributions
        for device in self.subject.plan.devices:
            for info in device.slots:
                if not contributions.get(info.name):
                    continue
                if info.role is Role.SHARD or info.name not in self.subject.dag.shards:
                    done: Container[int] = self.updated.get(info.name, {})
                else:
                    done = self.refreshed.get(info.name, set())
                if info.role in (Role.PARAMETER, Role.SHARD) and device.device not in done:
                    yield f"device {device.device}: {info.role.value} {info.name!r} is never updated"
        for name, copies in self.updated.items():
            ways = {(history, shard) for _, history, shard in copies.values()}
            if len(ways) > len({shard for _, _, shard in copies.values()}):
                yield (
                    f"the copies of parameter {name!r} on devices {sorted(copies)} get sums that "
                    "were added up differently: they would drift apart by rounding"
                )


def _carry(given: _Columns) -> _Columns:
    """A message or a broadcast: all get what the first member has."""
    return [given[0]] * len(given)


def _all_reduce(given: _Columns) -> _Columns | None:
    """Every member gets the sums."""
    sums = _sums(given)
    return None if sums is None else [sums] * len(given)


def _reduce_scatter(given: _Columns) -> _Columns | None:
    """Member i gets slice i of the sums."""
    sums = _sums(given)
    if sums is None or any(total is None or total.shard != WHOLE for total in sums):
        return None
    mine = [total for total in sums if total is not None]
    return [[replace(total, shard=i) for total in mine] for i in range(len(given))]


def _sums(given: _Columns) -> list[Total | None] | None:
    """Sum i is that of the members' i-th inputs; ``None`` if these do not fit together."""
    results: list[Total | None] = []
    if len({len(totals) for totals in given}) != 1:
        return None
    for column in zip(*given, strict=True):
        present = [total for total in column if total is not None]
        if not present:
            results.append(None)
            continue
        if len(present) < len(column) or len({_kind(t) for t in present}) != 1:
            return None
        history = hash(tuple(total.history for total in present))
        counts = sum(total.counts for total in present)
        kept = sum(total.kept for total in present)
        results.append(replace(present[0], counts=counts, history=history, kept=kept))
    return results


def _kind(total: Total) -> tuple[tuple[str, int], int, bool]:
    """What totals that are added must have in common: what they are for, the slice, whether they are divided already."""
    return total.target, total.shard, total.final


def _is_sum(instruction: Instruction) -> bool:
    """Whether an instruction adds up what its members give, if it combines it at all."""
    if not isinstance(instruction, AllReduceBucket):
        return True
    return not instruction.average and instruction.reduce is ReduceOp.SUM


_MEETINGS: Mapping[str, Callable[[_Columns], _Columns | None]] = {
    "send": _carry,
    "receive": _carry,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _carry,
}
