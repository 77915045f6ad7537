"""Changes bytes whose structure is known: JSON as a tree, a pickle as opcodes."""

from __future__ import annotations

import json
import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["change_json", "change_lines", "opcode_changes"]

_VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2, 63, 64, 255, 1 << 31, 1 << 32, (1 << 62) + 1, 1 << 63, 1 << 64, -(1 << 63)),
    *(10**39, 10**41, 10**400, 0.5, -0.0, 1e15, 1e300, 1.7e308, 5e-324),
    *("", " ", "\0", "\x1b[2J", "\n", "..", "../../x", "/etc/passwd", "/", ".", "é", "e\u0301", "\ud800", "\u202e"),
    *("a" * 300, "a" * 5000, "0" * 32, "f" * 64, "12", "1e9", "٣", "²", "meta_000200.json", "latest", ".ckptmirror/x"),
    *([], {}, [[]], {"": None}, [0] * 40, ["a", "a"], {"a": {"a": {"a": 1}}}, json.loads("[" * 70 + "]" * 70)),
)


def change_json(data: bytes, longest: int, seed: int) -> bytes:
    """Change some values of a JSON text; empty if it is none."""
    chance = random.Random(seed)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return b""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        tree = _changed_tree(tree, chance)
    text = json.dumps(tree)
    return text.encode() if len(text) <= longest else b""


def _changed_tree(tree: Any, chance: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    for value in waiting:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(value, key) for key in keys]
        waiting += [value[key] for key in keys]
        if len(places) > 5000:
            break
    if not places or chance.random() < 0.01:
        return json.loads(json.dumps(chance.choice(_VALUES)))
    inside, key = chance.choice(places)
    kind = chance.randrange(7)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside[str(chance.choice([*_VALUES, *inside]))] = inside.pop(key)
    elif kind == 2:
        other, at = chance.choice(places)
        if (isinstance(other, dict) and at not in other) or (isinstance(other, list) and at >= len(other)):
            return tree
        inside[key] = json.loads(json.dumps(other[at]))
    elif kind == 3 and isinstance(inside, list):
        inside[key:key] = json.loads(json.dumps(inside[key : key + chance.choice((1, 1, 3))])) * chance.choice((1, 40))
    elif kind == 4 and isinstance(inside[key], str) and inside[key]:
        text, at = inside[key], chance.randrange(len(inside[key]) + 1)
        inside[key] = text[:at] + str(chance.choice(_VALUES))[:300] + text[at + chance.choice((0, 1)) :]
    elif kind == 5 and type(inside[key]) is int:
        inside[key] += chance.choice((-1, 1, 1 << 31, -(1 << 62), chance.randrange(1000)))
    else:
        inside[key] = json.loads(json.dumps(chance.choice(_VALUES)))
    return tree


def change_lines(data: bytes, longest: int, seed: int) -> bytes:
    """Change one of several lines, each of them JSON; leave one out, or repeat it."""
    chance = random.Random(seed)
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    kind = chance.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at:at] = [lines[chance.randrange(len(lines))]]
    else:
        lines[at] = change_json(lines[at], longest, chance.getrandbits(30)) or lines[at]
    return b"\n".join(lines)


def opcode_changes(seeds: Sequence[bytes], names: Sequence[str]) -> Callable[[bytes, int, int], bytes]:
    """Return what changes a pickle: its opcodes, mixed with those of the seeds, and with calls of ``names``."""
    numbers = [b"\x8a" + bytes([len(n)]) + n for n in map(pickle.encode_long, (0, -1, 3, 255, 10**6, 1 << 63, 1 << 90))]
    pool = [
        *{piece for seed in seeds for piece in _opcodes(seed)[:2000]},
        *numbers,
        *(f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode() for name in names),
        *(
            b"X" + struct.pack("<I", len(t)) + t
            for t in (b"", b"storage", b"cpu", b"../x", b"latin1", b"0", b"\xed\xa0\x80")
        ),
        *(bytes([code]) for code in b"(NtR}])l\x85\x86\x87\x88\x89eusabQ\x81\x94o"),
        *(b"G" + struct.pack(">d", value) for value in (0.0, -1.0, float("inf"), float("nan"))),
        *(code + bytes([index]) for code in (b"h", b"q") for index in (0, 1, 2, 5, 9)),
    ]
    heavy = [piece for piece in pool if len(piece) > 1]

    def change(data: bytes, longest: int, seed: int) -> bytes:
        chance = random.Random(seed)
        pieces = _opcodes(data)
        if len(pieces) < 2:
            return b""
        for _ in range(chance.choice((1, 1, 2, 3, 6))):
            at, size = chance.randrange(len(pieces)), chance.choice((1, 1, 2, 4, 9))
            kind = chance.randrange(7)
            if kind == 0:
                del pieces[at : at + size]
            elif kind == 1:
                other = chance.randrange(len(pieces))
                pieces[at:at] = pieces[other : other + size] * chance.choice((1, 1, 1, 30))
            elif kind == 2:
                other = chance.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            elif kind == 3:
                pieces[at:at] = [chance.choice(pool)]
            elif kind == 4:
                pieces[at] = chance.choice(heavy)
            elif kind == 5:
                other = chance.randrange(len(pieces))
                pieces[at : at + size] = pieces[other : other + size]
            else:
                piece = bytearray(pieces[at])
                piece[chance.randrange(len(piece))] = chance.randrange(256)
                pieces[at] = bytes(piece)
            if len(pieces) < 2:
                break
        changed = b"".join(pieces)
        return changed if len(changed) <= longest else b""

    return change


def _opcodes(data: bytes) -> list[bytes]:
    starts: list[int] = []
    try:
        for _, _, at in pickletools.genops(data):
            starts.append(at)
    except Exception:  # noqa: BLE001, S110 - what follows is kept as one piece
        pass
    if not starts:
        return [data]
    return [data[at:end] for at, end in zip(starts, [*starts[1:], len(data)], strict=True)]
