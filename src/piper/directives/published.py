"""Strategy files of the published system: the forms that it accepts besides our own.

Frisella et al., *Piper: A Programmable Distributed Training System*, 2026 (arXiv 2606.11169). Its
files are lists of objects as ours. Early ones write a filter as a list of pairs, ``[["PP", 0],
["MB", 1]]``, and an order's group of one filter without the brackets of the group; indices may be
strings of digits; ``device`` may stand for ``devices``.
"""

from collections import Counter
from collections.abc import Mapping
from typing import TypeGuard

from piper.errors import StrategyFileError, nearest
from piper.ir.dag import Pass
from piper.ir.select import ANY, PASS

_PASSES = [*(p.value for p in Pass), ANY, None]


def in_our_form(directive: Mapping[str, object], where: str) -> dict[str, object]:
    """*directive*, one object of a strategy file, with every filter as an object.

    *where* is its place in the file. Raises :class:`StrategyFileError` for an order's group that is
    no list, a tag that a filter names twice, and an unknown pass; all else is left for the caller
    to check.
    """
    ours = dict(directive)
    if "device" in ours and "devices" not in ours:
        ours["devices"] = ours.pop("device")
    if "filter" in ours:
        ours["filter"] = _filter(ours["filter"], f"{where}.filter")
    groups = ours.get("filters")
    if isinstance(groups, list):
        ours["filters"] = [_group(g, f"{where}.filters[{i}]") for i, g in enumerate(groups)]
    return ours


def _group(group: object, where: str) -> object:
    if isinstance(group, dict):
        raise StrategyFileError(
            f"{where}: expected a group, which is a list of filters that may overlap, found a filter; "
            "put brackets around it"
        )
    if not isinstance(group, list):
        return group
    if group and _is_pairs(group):
        return [_filter(group, where)]
    return [_filter(item, f"{where}[{i}]") for i, item in enumerate(group)]


def _filter(filter_: object, where: str) -> object:
    if _is_pairs(filter_):
        count = Counter(name for name, _ in filter_)
        if repeated := [name for name, times in count.items() if times > 1]:
            raise StrategyFileError(f"{where}: the filter names tag {repeated[0]!r:.80} twice")
        filter_ = dict(filter_)
    if not isinstance(filter_, dict):
        return filter_
    _check_pass(filter_.get(PASS, ANY), f"{where}.{PASS}")
    return {
        name: int(value)
        if isinstance(value, str) and len(value) < 20 and value.isdecimal()
        else value
        for name, value in filter_.items()
    }


def _is_pairs(value: object) -> TypeGuard[list[tuple[str, object]]]:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in value
    )


def _check_pass(value: object, where: str) -> None:
    for word in value if isinstance(value, list) else [value]:
        if word not in _PASSES:
            names = [p.value for p in Pass]
            raise StrategyFileError(
                f"{where}: unknown pass {word!r}{nearest(str(word), names)}; passes: {', '.join(names)}"
            )
