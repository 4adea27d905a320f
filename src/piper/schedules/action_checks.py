"""Is a file of actions a schedule that can run?

Each check raises :class:`~piper.errors.ScheduleError` that names rank, row and cell.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from piper.errors import ScheduleError
from piper.limits import MAX_CELLS
from piper.schedules.actions import MESSAGES, SHARDING, Action, Group, actions_of

Rows = Sequence[Sequence[Group]]


def check_actions(rows: Rows) -> None:
    """Check *rows* as a whole: compute, then communication if there is any, then that it comes to
    an end.
    """
    computes = [a for row in rows for a in actions_of(row) if a.computes]
    if not computes:
        raise ScheduleError(
            "expected a row of actions per rank, such as 0F0,0F1,0B0,0B1; found none"
        )
    rank_of = _ranks_of_stages(computes)
    _check_complete(computes, len(rank_of))
    kinds = {a.kind for row in rows for a in actions_of(row)}
    if kinds.intersection(MESSAGES):
        _check_messages(rows, rank_of)
    if kinds.intersection(SHARDING):
        for row in rows:
            _check_sharding(list(actions_of(row)))
    _check_ends(rows, len(rank_of))


def _ranks_of_stages(computes: Sequence[Action]) -> dict[int, int]:
    rank_of: dict[int, int] = {}
    for action in computes:
        rank = rank_of.setdefault(action.stage, action.cell.rank)
        if rank != action.cell.rank:
            raise action.cell.error(
                f"stage {action.stage} is on rank {rank} already; a stage is on one rank"
            )
    missing = set(range(max(rank_of))) - set(rank_of)
    if missing:
        raise ScheduleError(
            f"stages count from 0 to {max(rank_of)}, but no rank runs stage {min(missing)}"
        )
    return rank_of


def _check_complete(computes: Sequence[Action], num_stages: int) -> None:
    """Every stage runs every microbatch forward once and backward once, in that order."""
    seen: dict[str, Action] = {}
    for action in computes:
        if str(action) in seen:
            raise action.cell.error(
                f"{action} is in cell {seen[str(action)].cell.position + 1} too"
            )
        for before in _before(action):
            if before not in seen:
                raise action.cell.error(f"{before} must come before {action}, on the same rank")
        seen[str(action)] = action
    count = 1 + max(action.microbatch for action in computes)
    if num_stages * count > MAX_CELLS:
        raise ScheduleError(
            f"expected at most {MAX_CELLS} stages times microbatches, found {num_stages} and {count}"
        )
    for stage in range(num_stages):
        for m in range(count):
            whole, halves = f"{stage}B{m}" in seen, (f"{stage}I{m}" in seen, f"{stage}W{m}" in seen)
            if f"{stage}F{m}" not in seen:
                raise ScheduleError(
                    f"stage {stage} has no forward of microbatch {m}, {count} microbatches being in the file"
                )
            if (whole, *halves) not in ((True, False, False), (False, True, True)):
                has = [k for k, there in zip("BIW", (whole, *halves), strict=True) if there]
                raise seen[f"{stage}F{m}"].cell.error(
                    f"microbatch {m} of stage {stage} needs one backward: B, or I and W; "
                    f"found {', '.join(has) or 'none'}"
                )


def _before(action: Action) -> Sequence[str]:
    """What the same rank has done before a compute action."""
    earlier = {"F": None, "B": "F", "I": "F", "W": "I"}[action.kind]
    return [] if earlier is None else [f"{action.stage}{earlier}{action.microbatch}"]


# --- messages -------------------------------------------------------------------------------------


def _check_messages(rows: Rows, rank_of: dict[int, int]) -> None:
    """Every value that crosses ranks is sent once and received once, at the right time; both ends
    in the same order.
    """
    there = {str(a): a for row in rows for a in actions_of(row) if a.kind in MESSAGES}
    queues: dict[tuple[int, int], list[str]] = defaultdict(list)
    for row in rows:
        for action in _in_time(list(actions_of(row)), rank_of, there):
            peer_stage = _peer(action)
            peer = there.get(_other_end(action))
            if peer_stage not in rank_of or rank_of[peer_stage] == action.cell.rank:
                raise action.cell.error(f"cannot be paired: no other rank has stage {peer_stage}")
            if peer is None or peer.cell.rank != rank_of[peer_stage]:
                raise action.cell.error(
                    f"cannot be paired: rank {rank_of[peer_stage]} has no {_other_end(action)}"
                )
            if action.kind.startswith("SEND"):
                queues[action.cell.rank, peer.cell.rank].append(_other_end(action))
    for row in rows:
        for action in actions_of(row):
            if action.kind.startswith("RECV"):
                source = rank_of[_peer(action)]
                expected = queues[source, action.cell.rank].pop(0)
                if expected != str(action):
                    raise action.cell.error(
                        f"cannot be paired: rank {source} sends what {expected} waits for first; sends and "
                        "receives between two ranks must come in the same order"
                    )


def _in_time(
    actions: Sequence[Action], rank_of: dict[int, int], there: dict[str, Action]
) -> Iterator[Action]:
    """The messages of one rank: each once, sent after it is made, received before it is read."""
    done: set[str] = set()
    for action in actions:
        name = str(action)
        if action.computes:
            needed = _received(action, rank_of)
            if needed is not None and needed not in done:
                later = (
                    f"comes later, in cell {there[needed].cell.position + 1}"
                    if needed in there
                    else "is missing"
                )
                raise action.cell.error(f"{needed}, which {name} waits for, {later}")
        elif action.kind in MESSAGES:
            if name in done:
                raise action.cell.error(f"{name} is there twice")
            if action.kind.startswith("SEND") and not done.intersection(_made_by(action)):
                raise action.cell.error(f"{' or '.join(_made_by(action))} must come before it")
            yield action
        done.add(name)


def _received(action: Action, rank_of: dict[int, int]) -> str | None:
    """The receive that a compute action needs."""
    if action.kind == "W":
        return None
    source = action.stage - 1 if action.kind == "F" else action.stage + 1
    if rank_of.get(source, action.cell.rank) == action.cell.rank:
        return None
    return f"{action.stage}RECV_{'F' if action.kind == 'F' else 'B'}{action.microbatch}"


def _made_by(send: Action) -> Sequence[str]:
    return [
        f"{send.stage}{kind}{send.microbatch}" for kind in ("F" if send.kind == "SEND_F" else "BI")
    ]


def _peer(message: Action) -> int:
    """The stage at the other end."""
    return message.stage + (1 if message.kind in ("SEND_F", "RECV_B") else -1)


def _other_end(message: Action) -> str:
    other = {"SEND": "RECV", "RECV": "SEND"}[message.kind[:4]]
    return f"{_peer(message)}{other}{message.kind[4:]}{message.microbatch}"


# --- sharded parameters ---------------------------------------------------------------------------


def _check_sharding(actions: Sequence[Action]) -> None:
    """On one rank: gathered parameters are freed and used in between; gradients are reduced once,
    after the last.
    """
    gathered: dict[int, Action] = {}
    left = Counter(a.stage for a in actions if a.computes)
    reduced: set[int] = set()
    gathers = any(a.kind == "UNSHARD" for a in actions)
    for action in actions:
        stage = action.stage
        if action.computes:
            left[stage] -= 1
            if gathers and stage not in gathered:
                raise action.cell.error(
                    f"stage {stage} is not gathered: {stage}UNSHARD must come first"
                )
        elif action.kind == "UNSHARD":
            if stage in gathered:
                raise action.cell.error(
                    f"stage {stage} is gathered already, by {gathered[stage].cell}"
                )
            gathered[stage] = action
        elif action.kind == "RESHARD":
            if gathered.pop(stage, None) is None:
                raise action.cell.error(
                    f"stage {stage} is not gathered: no {stage}UNSHARD before it"
                )
        elif action.kind == "REDUCE_GRAD":
            if left[stage] or stage in reduced:
                why = "work of the stage follows" if left[stage] else "it is there twice"
                raise action.cell.error(f"gradients are reduced once, after the last: {why}")
            reduced.add(stage)
    for action in gathered.values():
        raise action.cell.error(f"no {action.stage}RESHARD follows")


# --- the end --------------------------------------------------------------------------------------


def _check_ends(rows: Rows, num_stages: int) -> None:
    """Run the rows by data flow; raise if ranks come to wait for each other."""
    work = [[g for g in row if g[0].computes] for row in rows]
    position, done = [0] * len(rows), set[str]()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(work):
            while position[rank] < len(row):
                group = row[position[rank]]
                if any(_missing(a, done, num_stages) for a in group):
                    break
                done.update(map(str, group))
                position[rank] += 1
                moved = True
    waits = [
        f"{row[p][0].cell} waits for {' and '.join(m for a in row[p] for m in _missing(a, done, num_stages))}"
        for row, p in zip(work, position, strict=True)
        if p < len(row)
    ]
    if waits:
        raise ScheduleError("the ranks wait for each other for ever: " + "; ".join(waits))


def _missing(action: Action, done: set[str], num_stages: int) -> list[str]:
    """What *action* waits for and nobody has done."""
    stage, m = action.stage, action.microbatch
    needs: list[list[str]] = [[name] for name in _before(action)]
    if action.kind == "F" and stage:
        needs.append([f"{stage - 1}F{m}"])
    if action.kind in ("B", "I") and stage + 1 < num_stages:
        needs.append([f"{stage + 1}B{m}", f"{stage + 1}I{m}"])
    return [options[0] for options in needs if not done.intersection(options)]
