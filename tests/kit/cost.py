"""What a piece of work costs on any machine: how many functions it calls, and how many steps it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(work: Callable[[], object]) -> int:
    """Count the calls of functions, Python's and C's, that ``work`` makes in this thread."""
    calls = 0

    def note(_frame: object, event: str, _of: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    earlier = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(earlier)
    return calls


def steps_of(work: Callable[[], object]) -> int:
    """Count the instructions that ``work`` executes in this thread. Loops inside C functions are one step."""
    steps = 0

    def note(frame: FrameType, event: str, _of: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return note

    earlier = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(earlier)
    return steps
