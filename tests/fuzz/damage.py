"""Random damage to files: to their bytes, and to the values of a JSON file."""

import json
import random
from collections.abc import Callable

INTERESTING = [
    0, 1, -1, 2, 7, 255, 256, 65536, 10**6, 10**9, 10**12, 2**31, 2**53, 2**63, -(2**63), 2**64,
    10**30, 10**200, 0.0, -0.0, 0.5, 1e-300, 1e300, -1e300, True, False, None, "", "0", "x", "a" * 5000,
    "../../etc/passwd", "/dev/zero", "device-0000.json", "\x00", "</script><script>alert(1)</script>",
    "a, __import__('os').system('false')", "9**9**9", "(" * 300, "-" * 3000, "s0//0", "B*B", "aten.from_file.default",
    "aten.add_.Tensor", "os.system.default", "lambda", "\u2028", "é", [], [[]], {}, [0], [1, 1], [[0, 0]], {"op": "place"},
]  # fmt: skip
"""Values that have been trouble, here or elsewhere."""

TOKENS = [
    b"0", b"-1", b"999999999999", b"1e999", b"NaN", b"null", b"[", b"]", b"{", b"}", b'"', b",", b":", b"\x00", b"\xff",
    b"\xed\xa0\x80", b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\n", b"=", b"#", b"'''", b"[[a]]\n", b"true", b"\\u0000",
]  # fmt: skip

_Edit = Callable[[random.Random, bytes], bytes]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """*data* after one to three edits."""
    edits = [_flip, _cut, _insert, _repeat, _swap_lines, _digits, *([_structure] * 8)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = rng.choice(edits)(rng, data)
    return data


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    changed, at = bytearray(data), rng.randrange(len(data))
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    one, other = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:one] + data[other:] if rng.random() < 0.7 else data[:one]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    one = rng.randrange(len(data) + 1)
    piece = data[one : one + rng.choice((1, 10, 200))]
    return data[:one] + piece * rng.choice((2, 10, 1000)) + data[one:]


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"\n".join(lines)


def _digits(rng: random.Random, data: bytes) -> bytes:
    """Another number in place of one."""
    places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    start = rng.choice(places)
    end = start
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    number = rng.choice((b"0", b"-1", b"1000000000", b"1000000000000", b"1e400", b"9" * 400, b"3"))
    return data[:start] + number + data[end:]


def _structure(rng: random.Random, data: bytes) -> bytes:
    """One value of a JSON file replaced, left out, doubled, or exchanged for another's."""
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return _digits(rng, data)
    # By a walk from the root, so that what is near it is changed as often as the many leaves.
    places: list[tuple[object, object]] = []
    node: object = root
    while isinstance(node, (dict, list)) and node:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(keys)
        places.append((node, key))
        node = node[key]
    if not places:
        return data
    holder, key = rng.choice(places[-3:] if rng.random() < 0.8 else places)
    assert isinstance(holder, (dict, list))
    match rng.choice(("value", "value", "value", "remove", "double", "other", "nudge")):
        case "remove":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.insert(key, holder[key])
        case "other":
            holder[key] = holder[
                rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            ]
        case "nudge" if isinstance(holder[key], int):
            holder[key] += rng.choice((-2, -1, 1, 2))
        case _:
            holder[key] = rng.choice(INTERESTING)
    return json.dumps(root).encode()
