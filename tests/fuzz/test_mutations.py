"""What is changed keeps its structure, so that the changes come past the first check of a reader."""

from __future__ import annotations

import json
import pickle
import pickletools

from tests.fuzz.mutations import change_json, change_lines, opcode_changes

LONGEST = 10_000


def test_a_changed_json_is_another_json() -> None:
    text = json.dumps({"a": [1, 2.5, None, "text"], "b": {"c": True, "d": {}}, "e": "more"}).encode()
    changed = [change_json(text, LONGEST, seed) for seed in range(300)]
    found = {json.dumps(json.loads(one)) for one in changed if one}
    assert len(found) > 200
    assert all(len(one) <= LONGEST for one in changed)
    assert change_json(b"no json", LONGEST, 1) == b""
    assert {change_json(b"{}", LONGEST, seed) for seed in range(300)} != {b"{}"}


def test_a_line_is_changed_at_a_time() -> None:
    text = b'{"a": 1}\n{"b": 2}\n{"c": 3}\n'
    for seed in range(100):
        assert len(set(change_lines(text, LONGEST, seed).split(b"\n")) - set(text.split(b"\n"))) <= 1


def test_a_changed_pickle_is_mostly_opcodes_still() -> None:
    data = pickle.dumps({"a": [1, 2.5, None], "b": ("text", b"bytes", {1, 2})}, 2)
    change = opcode_changes([data], ["torch.FloatStorage"])
    changed = [one for seed in range(3000) if (one := change(data, LONGEST, seed))]
    assert len(set(changed)) > 2000
    assert sum(map(_is_read, changed)) > 1000
    assert any(b"torch\nFloatStorage" in one for one in changed)


def _is_read(data: bytes) -> bool:
    try:
        return bool(list(pickletools.genops(data)))
    except Exception:  # noqa: BLE001 - whatever it says, it is no pickle
        return False
