"""Runs a verb of the real command line on a terminal of its own, and reads what that shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.kit.cli import AS_MODULE, LIMIT_S, clean_environment

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
_PIECE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z])|(.|\n)", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def bare(text: str) -> str:
    """What a terminal shows, without the codes that colour and move."""
    return _ESCAPE.sub("", text)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end: what was written over or erased is gone. No line is wrapped."""
    lines, row, column = [""], 0, 0
    for escape, letter in _PIECE.findall(text):
        if letter == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif letter == "\r":
            column = 0
        elif escape.endswith("A"):
            row = max(0, row - int(escape[2:-1] or 1))
        elif escape.endswith("K"):
            lines[row] = "" if escape == "\x1b[2K" else lines[row][:column]
        elif letter:
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def _lead_a_session() -> None:
    """In the child: make the terminal on stderr the one that signals it."""
    os.setsid()
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)


class OnTerminal:
    """A verb with its stderr on a terminal of its own, and its stdout if wanted.

    What is typed there reaches it, and a typed Ctrl-C is shown as ``^C``.
    """

    def __init__(
        self,
        *arguments: str | Path,
        columns: int = 100,
        env: dict[str, str] | None = None,
        stdout_too: bool = False,
        **more: Any,
    ) -> None:
        self._here, there = pty.openpty()
        self.resize(columns)
        self.shown = ""
        environment = clean_environment(**({"TERM": "xterm"} | (env or {})))
        environment.pop("COLUMNS", None)
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [*AS_MODULE, *map(str, arguments)],
            stdout=there if stdout_too else subprocess.PIPE,
            stderr=there,
            text=True,
            env=environment,
            preexec_fn=_lead_a_session,
            **more,
        )
        os.close(there)

    def type(self, keys: str) -> None:
        """Type something."""
        os.write(self._here, keys.encode())

    def resize(self, columns: int) -> None:
        """Make the terminal as wide as this."""
        fcntl.ioctl(self._here, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def until(self, pattern: str) -> re.Match[str]:
        """Read until it has shown this, since it began."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(pattern, bare(self.shown))) is None:
            assert time.monotonic() < deadline, self.shown
            assert self._read(), f"it ended and showed no {pattern!r}:\n{bare(self.shown)}"
        return found

    def end(self) -> tuple[int, str, str]:
        """Read to the end; return exit code, stdout, and all that was shown."""
        while self._read():
            continue
        stdout, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, stdout or "", self.shown

    def _read(self) -> bool:
        ready, _, _ = select.select([self._here], [], [], LIMIT_S)
        assert ready, self.shown
        try:
            piece = os.read(self._here, 65536)
        except OSError:  # EIO: nobody holds the terminal any more
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self.process.kill()
        self.process.communicate()
        os.close(self._here)
