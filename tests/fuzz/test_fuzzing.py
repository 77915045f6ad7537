"""The fuzzing finds what a reader must not do, says which bytes did it, and shortens them."""

from __future__ import annotations

import faulthandler
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import fuzzing
from tests.fuzz.fuzzing import Reader, fuzz, repeat

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]


def loop() -> None:
    while True:
        pass


class RefusedError(Exception):
    pass


class Deep:
    def __hash__(self) -> int:
        return hash((self,))


DOES: dict[bytes, tuple[Any, str]] = {
    b"k": (lambda: {}["name"], "KeyError in "),
    b"r": (lambda: hash(Deep()), "RecursionError in "),
    b"u": (lambda: b"\xff".decode(), "UnicodeDecodeError in "),
    b"m": (lambda: bytearray(1 << 30), "MemoryError in "),
    b"t": (loop, "it took more than 0.5 s of CPU"),
    b"s": (faulthandler._sigsegv, "the process died: SIGSEGV"),
    b"x": (lambda: os._exit(3), "the process ended with 3"),
    b"w": (lambda: Path("written").write_text("x"), "it opened 'written' with 'w'"),
    b"o": (lambda: Path("/etc/hostname").read_text(), "it opened '/etc/hostname' with 'r'"),
    b"l": (lambda: os.symlink("a", "b"), "it did os.symlink 'a'"),
    b"p": (lambda: subprocess.run(["true"], check=False), "it did subprocess.Popen 'true'"),
    b"c": (lambda: socket.socket().connect(("127.0.0.1", 9)), "it did socket.__new__"),
    b"i": (lambda: __import__("this"), "it did import 'this'"),
    b"e": (lambda: eval("1"), "it did compile b'1'"),  # noqa: S307
}


def read_badly(data: bytes) -> None:
    if len(data) > 3 and data[:1] in DOES:
        DOES[data[:1]][0]()
    if data[:1] == b"n":
        raise RefusedError


BAD = Reader("planted", [b"a seed"], read_badly, (RefusedError,))


@pytest.mark.parametrize("first", list(DOES), ids=bytes.decode)
def test_what_a_reader_must_not_do_is_seen_and_named(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "CPU_S", 0.5)
    found = repeat(BAD, first + b"123")
    assert found is not None
    assert found[0].startswith(DOES[first][1]), found


@pytest.mark.parametrize("data", [b"a value", b"n: refused", b""])
def test_a_value_and_a_refusal_are_no_findings(data: bytes) -> None:
    assert repeat(BAD, data) is None


def test_a_reader_that_refuses_what_was_just_written_is_not_fuzzed_in_vain() -> None:
    with pytest.raises(RuntimeError, match="the first seed is refused"):
        repeat(Reader("deaf", [b"n"], read_badly, (RefusedError,)), b"x")


def test_a_reader_that_waits_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "_STALLED_S", 0.5)
    assert repeat(Reader("waits", [], lambda _: time.sleep(3600)), b"x") == ("it had no end after 0 s", "")


def test_a_file_that_changes_without_an_action_that_python_audits_is_seen() -> None:
    def prepare(_: bytes) -> int:
        return os.open("there", os.O_RDWR | os.O_CREAT)

    writes = Reader("writes", [], lambda descriptor: os.pwrite(descriptor, b"x", 0), prepare=prepare)
    assert repeat(writes, b"1") == ("it changed the files ['there']", "")


def test_bytes_that_kill_are_found_shortened_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("atheris", reason="atheris is not on this machine, and `make fuzz` needs it")

    def read(data: bytes) -> None:
        if b"#" in data and len(data) > 2:
            faulthandler._sigsegv()
        if b"!" in data:
            raise KeyError(data)

    reader = Reader("planted in depth", [b"a seed of some length"], read)
    done = fuzz(reader, tmp_path, seconds=3, seed=1)
    assert {one.what.partition(" in ")[0] for one in done.findings} == {"the process died: SIGSEGV", "KeyError"}
    for one in done.findings:
        assert one.kept_at.read_bytes() == one.data
        assert len(one.data) == (1 if one.what.startswith("KeyError") else 3)
        assert one.what in one.kept_at.with_suffix(".txt").read_text()
        assert repeat(reader, one.data) is not None
    assert done.executions > 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_slice_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not on this machine, and `make fuzz` needs it")
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seconds", "8", "--seed", "1", "--folder", str(tmp_path)],
        cwd=HOME,
        capture_output=True,
        text=True,
        check=False,
    )
    kept = "\n".join(path.read_text() for path in tmp_path.glob("*/finding-*.txt"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}\n{kept}"
    assert "0 findings" in done.stdout
