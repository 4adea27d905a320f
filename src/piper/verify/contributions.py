"""Every gradient contribution is summed exactly once before the update that uses it, every copy is
updated once, and the norm that gradients are clipped by counts each gradient once.

The plan is executed with symbols for numbers. A contribution is (the DAG value, the device that
made it). A sum is the multiset of its contributions, written as one integer with eight bits per
contribution: adding sums adds integers. Beside it goes a digest of how the sum was made, because
two copies of a parameter stay bitwise equal only if their gradients were added up in the same way.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace

from piper.ids import DeviceId, Slot
from piper.ir.dag import GradientUse, LossKind, Role
from piper.ops.accumulate import Accumulate
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.base import CommunicatorId, Instruction, ReduceOp, Rendezvous
from piper.ops.grad_norm import CombineParts, FinishNorm, MeasureGradients
from piper.ops.keep import AddKeptGradients, KeepGradients
from piper.ops.product import Multiply
from piper.ops.round_masters import StoreRounded
from piper.ops.update import OptimizerStep
from piper.verify.deadlock import Place
from piper.verify.keeping import Keeping, kept_by
from piper.verify.meetings import Columns, Given, Party
from piper.verify.norms import Norms
from piper.verify.origins import WEIGHT, Origins
from piper.verify.symbolic import WHOLE, Total
from piper.verify.trace import Problem, Subject

CHECK = "contributions"


def check_contributions(
    subject: Subject, completed: Sequence[tuple[Place, ...]]
) -> Iterator[Problem]:
    """Problems. *completed* is the order of a complete execution, members of one rendezvous
    together.
    """
    for text in _Symbolic(subject).run(completed):
        yield Problem(CHECK, text)


class _Symbolic:
    """The symbolic execution."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.origins = Origins(subject.dag)
        self.totals: list[dict[Slot, Total]] = [{} for _ in subject.traces]
        self._parties: dict[CommunicatorId, Sequence[Party] | None] = {}
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
            if one is None or two is None or one.kind != two.kind:
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
        if meeting.role == "refresh":
            yield from self.refresh(places)
            return
        parties = self.parties(meeting)
        if parties is None:
            yield f"{self.subject.at(device, first)}: meets devices that no member stands for; plan without folding"
            return
        traces = self.subject.traces
        totals = {
            DeviceId(d): [self.totals[d].get(slot) for slot in traces[d].reads[i]]
            for d, i in at.items()
        }
        if all(total is None for mine in totals.values() for total in mine):
            return
        kind = _MEETINGS.get(meeting.role)
        if kind is None or not _is_sum(traces[device].instructions[first]):
            yield f"{self.subject.at(device, first)}: does not pass on sums of contributions"
            return
        results = kind(Given(self.origins, self.subject.roles, meeting, parties, totals))
        if results is None:
            yield (
                f"{self.subject.at(device, first)}: the members do not contribute parts of the same "
                f"sums: {[[t and t.name for t in mine] for mine in totals.values()]}"
            )
            return
        for place, position in places:
            self.totals[place].update(
                {
                    slot: total
                    for slot, total in zip(
                        traces[place].writes[position], results[DeviceId(place)], strict=False
                    )
                    if total is not None
                }
            )

    def parties(self, meeting: Rendezvous) -> Sequence[Party] | None:
        """Who meets on the communicator of *meeting*, in the order of its members; ``None`` if a
        member without a program is stood for by a device that takes no part.
        """
        if meeting.communicator not in self._parties:
            present, roles = self.subject.members(meeting), self.subject.roles
            standing: dict[DeviceId, list[DeviceId]] = {device: [] for device in present}
            for member in meeting.members:
                first = member if roles is None or member in standing else roles.first(member)
                standing.setdefault(first, []).append(member)
            complete = len(standing) == len(present)
            self._parties[meeting.communicator] = (
                [Party(device, tuple(alike)) for device, alike in standing.items()]
                if complete
                else None
            )
        return self._parties[meeting.communicator]

    def refresh(self, places: Sequence[Place]) -> Iterator[str]:
        """Whole parameters are remade of slices: all of these must have been updated."""
        for device, i in places:
            yield from self.round(device, i)

    def round(self, device: int, i: int) -> Iterator[str]:
        """Whole parameters are remade of slices or master copies: what this device holds of these
        must have been updated.
        """
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
        if weight is None or weight.name != WEIGHT or weight.scaled or role is not Role.SCALE:
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
            key = (name, self.origins.part(name, DeviceId(device)))
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
        """What is wrong with the scalar that *gradients* are divided by, before anything is made of
        them: the total weight of a weighted loss, the scale of a scaled one, or both.

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
                WEIGHT,
                self.origins.full[WEIGHT, WHOLE],
            ):
                yield self.wrong(here, device, scale, WEIGHT, weight)
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
            if total is None or total.target != (name, self.origins.part(name, DeviceId(device))):
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

    def elsewhere(self, device: int, total: Total) -> Iterator[Total]:
        """What *total* is on the devices for which *device* stands, if the plan is folded."""
        if (roles := self.subject.roles) is None:
            return
        for other in next((role[1:] for role in roles.roles if role[0] == device), ()):
            if (image := self.origins.together(total, (other,), roles)) is not None:
                yield image

    def measure(self, device: int, i: int) -> Iterator[str]:
        """Gradients are measured as they will be used."""
        instruction = self.subject.traces[device].instructions[i]
        assert isinstance(instruction, MeasureGradients)
        yield from self.divided(device, i, instruction.gradients, instruction.scale)
        yield from self.norms.measure(device, i)

    def wrong(self, here: str, device: int, slot: Slot, name: str, total: Total | None) -> str:
        """What is wrong with the sum in *slot*."""
        wanted = f"the gradient of {name!r}" if name else "the total loss weight"
        found = f"{here}: {self.subject.slot(device, slot)} should be {wanted}"
        if total is None:
            return f"{found}, but is no sum of contributions"
        if total.name != name:
            return f"{found}, but is a sum for {total.name or 'the loss weight'!r}"
        lines = [self.origins.difference(total), *self.keeping.difference(total)]
        return f"{found}, but\n" + "\n".join(line for line in lines if line)

    def complete(self, total: Total) -> bool:
        """Whether *total* is a whole gradient, or a slice of one: all contributions once, and what
        every device kept.
        """
        full = self.origins.full.get(total.target)
        return total.counts == full and total.kept == self.keeping.wanted(total)

    def kept(self) -> Iterator[str]:
        """What all devices keep of each gradient is together all contributions to it."""
        for total in self.keeping.not_kept(self.origins.full):
            which = "" if total.shard == WHOLE else f" slice {total.shard}"
            yield (
                f"what devices keep of the gradient of {total.name!r}{which} should be all of it together, but\n"
                f"{self.origins.difference(total)}"
            )

    def copies(self) -> Iterator[str]:
        """The gradient of each copy of a parameter that has contributions is used, all in the same
        way.
        """
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


def _carry(given: Given) -> Columns:
    """A message or a broadcast: all get what the first member has."""
    carried = given.of_first_member()
    return dict.fromkeys(given.places, carried)


def _all_reduce(given: Given) -> Columns | None:
    """Every member gets the sums."""
    sums = given.sums()
    return None if sums is None else dict.fromkeys(given.places, sums)


def _reduce_scatter(given: Given) -> Columns | None:
    """Member i gets slice i of the sums."""
    sums = given.sums()
    if sums is None or any(total is None or total.shard != WHOLE for total in sums):
        return None
    mine = [total for total in sums if total is not None]
    return {
        device: [replace(total, shard=place) for total in mine]
        for device, place in given.places.items()
    }


def _is_sum(instruction: Instruction) -> bool:
    """Whether an instruction adds up what its members give, if it combines it at all."""
    if not isinstance(instruction, AllReduceBucket):
        return True
    return not instruction.average and instruction.reduce is ReduceOp.SUM


_MEETINGS: Mapping[str, Callable[[Given], Columns | None]] = {
    "send": _carry,
    "receive": _carry,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _carry,
}
