"""The norm that gradients are clipped by counts the gradient of every parameter once, and every
update uses it.

Executed with symbols, beside the sums of ``contributions``: a norm is the list of the gradients, or
slices of them, that it counts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from piper.ids import DeviceId, Slot
from piper.ir.dag import DeviceGroup
from piper.ops.all_reduce import AllReduceBucket
from piper.ops.grad_norm import CombineParts, FinishNorm, MeasureGradients, Norm
from piper.ops.update import OptimizerStep
from piper.verify.deadlock import Place
from piper.verify.symbolic import WHOLE, Measured, Total
from piper.verify.trace import Subject


class Norms:
    """The symbolic norms of all devices. *totals* are the sums, by device; *complete* says whether
    one of them is a whole gradient.
    """

    def __init__(
        self,
        subject: Subject,
        totals: Sequence[Mapping[Slot, Total]],
        complete: Callable[[Total], bool],
    ) -> None:
        self.subject, self.totals, self.complete = subject, totals, complete
        self.norms: list[dict[Slot, Measured]] = [{} for _ in subject.traces]

    def at(self, device: int) -> Mapping[Slot, Measured]:
        """The norms, and parts of it, that *device* has."""
        return self.norms[device]

    def measure(self, device: int, i: int) -> Iterator[str]:
        """A part counts gradients."""
        subject = self.subject
        instruction = subject.traces[device].instructions[i]
        assert isinstance(instruction, MeasureGradients)
        yield from self._asked_for(device, i, instruction.norm)
        counted: list[Total] = []
        for slot in instruction.gradients:
            total = self.totals[device].get(slot)
            if total is None or not total.name or not self.complete(total):
                yield f"{subject.at(device, i)}: {subject.slot(device, slot)} is not a whole gradient"
                continue
            counted.append(total)
        pairs = tuple(sorted((total.name, total.part, total.shard) for total in counted))
        history = hash(tuple(total.history for total in counted))
        self.norms[device][instruction.part] = Measured(pairs, history)

    def combine(self, device: int, i: int) -> Iterator[str]:
        """Parts of one device become one."""
        instruction = self.subject.traces[device].instructions[i]
        assert isinstance(instruction, CombineParts)
        yield from self._asked_for(device, i, instruction.norm)
        parts = [self.norms[device].get(slot) for slot in instruction.parts]
        mine = [part for part in parts if part is not None and not part.finished]
        if len(mine) < len(parts):
            yield f"{self.subject.at(device, i)}: combines what is no part of the norm"
        self.norms[device][instruction.part] = Measured.together(mine)

    def concerned(self, places: Sequence[Place]) -> bool:
        """Whether a rendezvous carries parts of the norm."""
        reads = ((d, self.subject.traces[d].reads[i]) for d, i in places)
        return any(slot in self.norms[d] for d, slots in reads for slot in slots)

    def meet(self, places: Sequence[Place]) -> Iterator[str]:
        """An all-reduce of parts, one of each member."""
        device, first = places[0]
        traces = self.subject.traces
        parts = [self.norms[d].get(s) for d, i in places for s in traces[d].reads[i]]
        mine = [part for part in parts if part is not None and not part.finished]
        complete = len(mine) == len(parts) == len(places)
        mine += self._images(places, parts)
        if not complete or not self._combines(traces[device].instructions[first]):
            yield f"{self.subject.at(device, first)}: does not combine one part of the norm of each member"
            return
        together = Measured.together(mine)
        for d, i in places:
            self.norms[d].update(dict.fromkeys(traces[d].writes[i], together))

    def _images(
        self, places: Sequence[Place], parts: Sequence[Measured | None]
    ) -> Iterator[Measured]:
        """The parts of members without a program: those of the device that stands for each, with
        that member's slices.
        """
        roles = self.subject.roles
        if roles is None:
            return
        meeting = self.subject.traces[places[0][0]].meetings[places[0][1]]
        assert meeting is not None
        given = {device: part for (device, _), part in zip(places, parts, strict=False)}
        for member in meeting.members:
            part = given.get(roles.first(member))
            if member in given or part is None:
                continue
            dag = self.subject.dag
            counted = tuple(
                (
                    name,
                    which if which == WHOLE else _place(dag.expert_groups[name], member),
                    k if k == WHOLE else _place(dag.shards[name], member),
                )
                for name, which, k in part.counted
            )
            yield Measured(counted, part.history)

    def _combines(self, instruction: object) -> bool:
        clip = self.subject.dag.clip
        return (
            clip is not None
            and isinstance(instruction, AllReduceBucket)
            and instruction.reduce is clip.norm.combines
            and not instruction.average
        )

    def finish(self, device: int, i: int) -> Iterator[str]:
        """The norm counts the gradient of every parameter that has one: whole once, or each slice
        once.
        """
        subject = self.subject
        instruction = subject.traces[device].instructions[i]
        assert isinstance(instruction, FinishNorm)
        here = subject.at(device, i)
        yield from self._asked_for(device, i, instruction.norm)
        part = self.norms[device].get(instruction.part)
        if part is None or part.finished:
            yield f"{here}: {subject.slot(device, instruction.part)} is no part of the norm"
            return
        wanted, found = Counter(self._every_gradient()), Counter(part.counted)
        if wrong := [key for key in {**wanted, **found} if wanted[key] != found[key]]:
            listed = ", ".join(
                f"{key[0]!r}{_which(*key[1:])} {found[key]} times instead of {wanted[key]}"
                for key in wrong[:6]
            )
            yield f"{here}: the norm counts {listed}"
        self.norms[device][instruction.result] = Measured(part.counted, part.history, finished=True)

    def _every_gradient(self) -> Iterator[tuple[str, int, int]]:
        dag = self.subject.dag
        for name, values in dag.contributions.items():
            if not values:
                continue
            parts = (
                range(len(dag.expert_groups[name][0])) if name in dag.expert_groups else (WHOLE,)
            )
            count = len(dag.shards[name][0]) if name in dag.shards else 1
            slices = range(count) if count > 1 else (WHOLE,)
            yield from ((name, part, k) for part in parts for k in slices)

    def clips(self, device: int, i: int, instruction: OptimizerStep) -> Iterator[str]:
        """What is wrong with the norm that an update clips by, or by which it sees whether all
        gradients are finite.
        """
        here, clip = self.subject.at(device, i), self.subject.dag.clip
        max_norm = None if clip is None else clip.max_norm
        if instruction.max_norm != max_norm:
            yield f"{here}: clips to {instruction.max_norm}, asked for is {max_norm}"
        scaled = self.subject.dag.loss_scaled
        if instruction.only_finite != scaled:
            when = "whatever the norm is" if scaled else "only if the norm is finite"
            yield f"{here}: updates {when}"
        if max_norm is None and not scaled:
            return
        slot = instruction.grad_norm
        norm = None if slot is None else self.norms[device].get(slot)
        if norm is None or not norm.finished:
            yield f"{here}: does not use the norm of all gradients"

    def _asked_for(self, device: int, i: int, norm: Norm) -> Iterator[str]:
        clip = self.subject.dag.clip
        if clip is None or clip.norm is not norm:
            asked = "none" if clip is None else clip.norm.value
            yield f"{self.subject.at(device, i)}: measures norm {norm.value}, asked for is {asked}"


def _place(groups: Sequence[DeviceGroup], device: int) -> int:
    """Which slice, or part of the experts, *device* holds, *groups* being those that share."""
    return next(g.index(DeviceId(device)) for g in groups if device in g)


def _which(part: int, shard: int) -> str:
    """The part of the experts and the slice of a gradient, for people."""
    words = "" if part == WHOLE else f" part {part} of the experts"
    return words if shard == WHOLE else f"{words} slice {shard}"
