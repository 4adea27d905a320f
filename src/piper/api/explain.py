"""Why a node runs where and when it does."""

from collections.abc import Iterator, Sequence

from piper.boundary import public
from piper.directives.base import Directive
from piper.directives.order import Order, left_out
from piper.directives.place import Place
from piper.directives.recompute import Recompute
from piper.directives.split import Split
from piper.errors import PlanError, expect, nearest
from piper.ids import DeviceId, EventId, NodeId
from piper.ir.dag import Chunk, Comm, Dag, Node
from piper.ir.select import Selector
from piper.ops.base import Instruction
from piper.plan.model import Plan
from piper.simulate import simulate
from piper.simulate.timeline import FORWARDS, Box, Timeline, time_text
from piper.sizes import size_text

_SHOWN = 12


@public
def explain(
    plan: Plan,
    what: str | int,
    strategy: Sequence[Directive] = (),
    timeline: Timeline | None = None,
) -> str:
    """Why *what* of *plan* runs where and when it does, for people.

    *what* is a node, by number (``17``) or label (``"F PP=1 MB=0"``); a device (``"device 1"``);
    or a step of a device's program (``"1#17"``: device 1, instruction 17). *strategy* is what the
    plan was made from. Without a *timeline* times are counted in forwards.

    Raises :class:`PlanError` if there is no such thing.
    """
    expect(plan, Plan, "explain", "piper.plan makes one of a training DAG")
    line = simulate(plan) if timeline is None else timeline
    found = _Explainer(plan, strategy, line)
    text = str(what).strip()
    if text.startswith("device"):
        lines = found.device(_number(text.removeprefix("device").lstrip(" :"), what))
        return "\n".join((*lines, *_about(line)))
    device, hash_, position = text.partition("#")
    if hash_:
        lines = found.step(_number(device, what), _number(position, what))
    else:
        lines = found.node(_find_node(plan.dag, text))
    return "\n".join((*lines, *_about(line)))


def _about(timeline: Timeline) -> tuple[str, ...]:
    """What times are counted in, where it is no unit that people know."""
    return ("(F: one forward; a backward is 2 F)",) if timeline.unit == FORWARDS else ()


def _number(text: str, what: str | int) -> int:
    if not text.strip().isdigit():
        raise PlanError(
            f'{what!r} is not a node, a device or a step; write a number, a label such as "F PP=1 MB=0", "device 1", or "1#17"'
        )
    return int(text)


def _find_node(dag: Dag, text: str) -> Node:
    if text.isdigit():
        if (node := dag.nodes.get(NodeId(int(text)))) is None:
            raise PlanError(f"there is no node {text}; nodes are numbered up to {max(dag.nodes)}")
        return node
    found = [n for n in dag.nodes.values() if n.label == text]
    if not found:
        labels = dict.fromkeys(n.label for n in dag.nodes.values())
        if longer := [label for label in labels if label.startswith(f"{text} ")]:
            more = ", …" if len(longer) > 4 else ""
            raise PlanError(
                f"no node has the label {text!r}; there are {', '.join(map(repr, longer[:4]))}{more}"
            )
        raise PlanError(f"no node has the label {text!r}{nearest(text, labels)}")
    return found[0]


class _Explainer:
    def __init__(self, plan: Plan, strategy: Sequence[Directive], timeline: Timeline) -> None:
        self.plan, self.dag, self.timeline = plan, plan.dag, timeline
        self.strategy = strategy
        self.selector = Selector(plan.dag)
        self.boxes = {(d.device, b.position): b for d in timeline.devices for b in d.boxes()}

    def _time(self, value: float) -> str:
        return time_text(value, self.timeline.unit)

    # --- nodes ------------------------------------------------------------------------------------

    def node(self, node: Node) -> Iterator[str]:
        """Where it runs and who said so, what it waits for, when it runs on each device."""
        yield f"node {node.id}: {node.label}"
        yield f"  what: {self._what(node)}"
        yield from (f"  where: {text}" for text in self._where(node))
        yield from self._before(node)
        for device in dict.fromkeys(node.participants):
            for position, instruction in enumerate(self.plan.devices[device].instructions):
                if instruction.node == node.id and instruction.awaits() is None:
                    yield from self._when(device, position, instruction)

    def _what(self, node: Node) -> str:
        if isinstance(node, Comm):
            return f"communication ({node.work.kind}) on stream {node.stream!r}, which follows from where its values are made and read"
        if node.derived:
            return f"{node.work.kind}, which follows from where the parameters are used"
        return f"a chunk of the model, pass {node.pass_.value}, {len(node.inputs)} values in, {len(node.outputs)} out"

    def _where(self, node: Node) -> Iterator[str]:
        if isinstance(node, Comm):
            groups = [list(group) for group in node.groups]
            yield f"between devices {_few(groups)}"
            for other in self._linked(node):
                yield from self._placed(other)
            return
        yield f"on devices {_few(list(node.participants))}"
        if not node.derived:
            yield from self._placed(node)

    def _linked(self, comm: Comm) -> list[Chunk]:
        """The chunks that make or read what *comm* carries."""
        makers = [self.dag.producers.get(v) for v in comm.inputs]
        readers = [n for v in comm.outputs for n in self.dag.consumers.get(v, ())]
        nodes = [self.dag.nodes[n] for n in dict.fromkeys((*makers, *readers)) if n is not None]
        return [n for n in nodes if isinstance(n, Chunk) and not n.derived][:4]

    def _placed(self, chunk: Chunk) -> Iterator[str]:
        """The directives that say where *chunk* runs, and as what."""
        known = False
        for number, directive in enumerate(self.strategy):
            if not isinstance(directive, (Place, Split, Recompute)):
                continue
            if chunk.id in self.selector.find(directive.filter):
                known |= isinstance(directive, Place)
                yield f"{chunk.label}: directive {number}, {directive.describe()}"
        if chunk.replication is not None:
            number = self.dag.replications[chunk.replication].directive
            yield f"{chunk.label}: directive {number}, {self.dag.directives[number]}"
        if not known:
            yield (
                f"{chunk.label}: no Place names it"
                if self.strategy
                else "(by the plan; the strategy is not known here)"
            )

    def _before(self, node: Node) -> Iterator[str]:
        dag = self.dag
        data: dict[NodeId, list[str]] = {}
        for value in node.inputs:
            if (maker := dag.producers.get(value)) is not None:
                data.setdefault(maker, []).append(dag.values[value].role.value)
        lines = [
            f"  after node {n} [{dag.nodes[n].label}]: it makes {', '.join(dict.fromkeys(roles))}"
            for n, roles in data.items()
        ]
        for edge in dag.order:
            if edge.after == node.id:
                said = (
                    f"directive {edge.directive}, {dag.directives[edge.directive]}"
                    if 0 <= edge.directive < len(dag.directives)
                    else "the model's order"
                )
                lines.append(f"  after node {edge.before} [{dag.nodes[edge.before].label}]: {said}")
        ordered = {e.before for e in dag.order if e.after == node.id}
        lines += [
            f"  after node {n} [{dag.nodes[n].label}]: it reads what this node overwrites"
            for n in dag.predecessors[node.id]
            if n not in data and n not in ordered
        ]
        yield from lines[:_SHOWN]
        if len(lines) > _SHOWN:
            yield f"  … and {len(lines) - _SHOWN} more"

    def _when(self, device: DeviceId, position: int, instruction: Instruction) -> Iterator[str]:
        box = self.boxes.get((device, position))
        where = f"  on device {device} it is #{position}, {instruction.op} on stream {instruction.stream!r}"
        if box is None:
            yield f"{where}, and takes no time"
            return
        yield f"{where}, from {self._time(box.start)} to {self._time(box.end)}{', on the critical path' if box.critical else ''}"
        yield f"    {self._waited(box)}"

    def _waited(self, box: Box) -> str:
        if not box.waits_on:
            return "it starts at once"
        names = [
            f"node {n} [{self.dag.nodes[n].label}]" if n in self.dag.nodes else "local work"
            for n in box.waits_on
        ]
        return f"what it waited for last: {', '.join(names)}"

    # --- devices and steps ------------------------------------------------------------------------

    def device(self, device: int) -> Iterator[str]:
        """What a device is for, how it is ordered, how busy it is."""
        if not 0 <= device < self.plan.num_devices:
            raise PlanError(
                f"there is no device {device}; the plan has devices 0 to {self.plan.num_devices - 1}"
            )
        role = next(r for r in self.plan.represented() if device in r)
        if role[0] != device:
            yield f"device {device} does the same as device {role[0]}, renamed:"
        mine = self.plan.devices[role[0]]
        line = next(d for d in self.timeline.devices if d.device == mine.device)
        yield f"device {device}: {len(mine.instructions)} instructions on {len({i.stream for i in mine.instructions})} streams"
        yield f"  computes {self._time(line.busy)}, bubble {line.bubble:.1%}, exposed communication {self._time(line.exposed)}, peak {size_text(line.peak)}"
        chunks = [n for n in self.dag.chunks() if not n.derived and mine.device in n.participants]
        for number, directive in enumerate(self.strategy):
            if isinstance(directive, (Place, Order)) and self._concerns(directive, chunks):
                yield f"  directive {number}, {directive.describe()}"
        if missing := [
            c for c in left_out(self.dag, self.strategy) if mine.device in c.participants
        ]:
            labels = ", ".join(c.label for c in missing[:4]) + (" …" if len(missing) > 4 else "")
            yield f"  no Order names {len(missing)} of its chunks, though some name others like them: {labels}"
        yield "  its longest waits:"
        yield from self._gaps(line.boxes())

    def _concerns(self, directive: Place | Order, chunks: Sequence[Chunk]) -> bool:
        mine = {chunk.id for chunk in chunks}
        if isinstance(directive, Place):
            return not mine.isdisjoint(self.selector.find(directive.filter))
        return any(
            not mine.isdisjoint(self.selector.find(filter_))
            for group in directive.filters
            for filter_ in group
        )

    def _gaps(self, boxes: Iterator[Box]) -> Iterator[str]:
        """The longest idle times of the compute stream, and what ended them."""
        compute = [b for b in boxes if b.op == "compute"]
        ends = [0.0, *(b.end for b in compute)]
        gaps = sorted(
            ((b.start - end, b) for end, b in zip(ends, compute, strict=False)), key=lambda g: -g[0]
        )
        for gap, box in gaps[:5]:
            if gap > 0:
                yield f"    {self._time(gap)} before {box.label}: {self._waited(box)}"

    def step(self, device: int, position: int) -> Iterator[str]:
        """One instruction: what it is, what its stream and its waits hold it back for, its node."""
        if not 0 <= device < len(self.plan.devices):
            raise PlanError(
                f"there is no device {device}; the plan has devices 0 to {len(self.plan.devices) - 1}"
            )
        instructions = self.plan.devices[device].instructions
        role = next(r for r in self.plan.represented() if device in r)
        if role[0] != device:
            raise PlanError(
                f"device {device} does the same as device {role[0]}, which has the program of both; ask for {role[0]}#{position}"
            )
        if position >= len(instructions):
            raise PlanError(f"device {device} has {len(instructions)} instructions, no #{position}")
        instruction = instructions[position]
        yield f"device {device} #{position}: {instruction.describe()} on stream {instruction.stream!r}"
        before = [i for i in range(position) if instructions[i].stream == instruction.stream]
        for index in reversed(before):
            other = instructions[index]
            if (event := other.awaits()) is None:
                yield f"  behind #{index} {other.describe()} on the same stream"
                break
            yield from self._awaits(instructions, event)
        if (event := instruction.awaits()) is not None:
            yield from self._awaits(instructions, event)
        box = self.boxes.get((DeviceId(device), position))
        if box is not None:
            yield f"  from {self._time(box.start)} to {self._time(box.end)}; {self._waited(box)}"
        if (node := self.dag.nodes.get(instruction.node)) is not None:
            yield from self.node(node)

    def _awaits(self, instructions: Sequence[Instruction], event: EventId) -> Iterator[str]:
        for index, other in enumerate(instructions):
            if other.record == event:
                yield f"  waits for #{index} {other.describe()} on stream {other.stream!r}"


def _few(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:8]))
    return f"{shown}, … ({len(items)} in all)" if len(items) > 8 else shown
