"""What is wrong with a field of a TOML file, in the words of TOML."""

import re

from msgspec import inspect

from piper.errors import nearest


def explain(message: str, raw: object, section: type) -> str:
    """Msgspec's *message* about *raw*, which is no *section*: the path of a field, what was
    expected there and what was found.
    """
    problem, _, where = message.partition(" - at `$")
    steps = re.findall(r"\w+", where)
    field = where.rstrip("`").lstrip(".")
    if unknown := re.search(r"unknown field `(.+)`", problem):
        known = _known_fields(section, steps, raw)
        name = unknown[1]
        place = f"{field}.{name}" if field else name
        return f"{place}: unknown field{nearest(name, known)}; known here: {', '.join(known)}"
    if missing := re.search(r"missing required field `(.+)`", problem):
        return f"{missing[1]}: expected this {'field' if field else 'section'}, found none"
    found = _found(_lookup(raw, steps))
    if problem.startswith("Invalid"):
        allowed = ", ".join(_found(value) for value in _allowed(section, steps, raw))
        return f"{field}: expected one of {allowed}, found {found}"
    expected = problem.removeprefix("Expected ").partition(", got")[0]
    return f"{field}: expected {_in_toml_words(expected)}, found {found}"


_TOML_WORDS = {
    "`object`": "a section",
    "`array`": "an array",
    "`int`": "an integer",
    "`float`": "a number",
    "`str`": "a string",
    "`bool`": "true or false",
    "`bool | str`": "true, false or a string",
    "`array | null`": "an array",
    "`int | null`": "an integer",
    "`float | null`": "a number",
    "`str | null`": "a string",
    "`int | str | null`": 'bytes, or a text such as "512MiB"',
}


def _in_toml_words(expected: str) -> str:
    for name, words in _TOML_WORDS.items():
        if expected.startswith(name):
            return words + expected.removeprefix(name)
    return expected


def _found(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"an array of {len(value)}: {value!r}"
    return repr(value)


def _lookup(raw: object, steps: list[str]) -> object:
    for step in steps:
        if isinstance(raw, dict):
            raw = raw[step]
        elif isinstance(raw, list):
            raw = raw[int(step)]
    return raw


def _type_at(section: type, steps: list[str], raw: object) -> inspect.Type:
    """The declared type at the path *steps*, choosing among tagged sections by the tag in *raw*."""
    kind: inspect.Type = inspect.type_info(section)
    for step in steps:
        kind, value = _chosen(kind, raw), _lookup(raw, [step])
        if not isinstance(kind, inspect.StructType) or step == kind.tag_field:
            break
        fields = {field.encode_name: field.type for field in kind.fields}
        kind, raw = fields[step], value
    return kind


def _chosen(kind: inspect.Type, value: object) -> inspect.Type:
    """Of a union, the member without ``None`` that *value* is tagged as, else the first."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    sections = [member for member in members if isinstance(member, inspect.StructType)]
    if not isinstance(value, dict):
        return members[0]
    for member in sections:
        if member.tag_field is not None and value.get(member.tag_field) == member.tag:
            return member
    return (sections or members)[0]


def _known_fields(section: type, steps: list[str], raw: object) -> list[str]:
    kind = _chosen(_type_at(section, steps, raw), _lookup(raw, steps))
    if not isinstance(kind, inspect.StructType):
        return []
    tag = [kind.tag_field] if kind.tag_field is not None else []
    return tag + [field.encode_name for field in kind.fields]


def _allowed(section: type, steps: list[str], raw: object) -> list[object]:
    """The values that the literal (perhaps besides true and false) or the tag at the path *steps*
    may take.
    """
    members = _members(_type_at(section, steps, raw))
    literals = [v for m in members if isinstance(m, inspect.LiteralType) for v in m.values]
    if literals:
        booleans = any(isinstance(member, inspect.BoolType) for member in members)
        return [*([True, False] if booleans else []), *literals]
    tagged = _members(_type_at(section, steps[:-1], raw))
    return [member.tag for member in tagged if isinstance(member, inspect.StructType)]


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)
