"""What others wrote into files beside the saves cannot print a line of its own, or move the cursor."""

from __future__ import annotations

import json
from pathlib import Path

from ckptmirror.core import events, names
from ckptmirror.core.errors import IntegrityError
from ckptmirror.local.lock import RootLock
from ckptmirror.observe.journal import Journal
from tests.kit.cli import run
from tests.kit.roots import fail_uploads, make_pending
from tests.kit.saves import make_save
from tests.kit.terminal import OnTerminal, bare

FORGED = "safe: every save is verified on every required mirror"
HOSTILE = f"x\n{FORGED}\r{FORGED}\x1b[2J\u2028{FORGED}\n"


def assert_nothing_forged(shown: str) -> None:
    assert "\x1b[2J" not in shown
    assert r"x\nsafe: every save" in shown.replace("\r\n", "")
    assert not [line for line in shown.replace("\r\n", "\n").splitlines() if line.startswith("safe:")]


def test_status_prints_no_line_that_is_in_a_file_of_others(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",))
    facts = {"status": HOSTILE, "host": HOSTILE, "pid": HOSTILE, "at_utc": HOSTILE}
    skipped = [{"step": 7, "reason": HOSTILE}]
    (root / names.STATUS_NAME).write_text(json.dumps({**facts, "skipped": skipped, HOSTILE: HOSTILE}))
    fail_uploads(root, reason=HOSTILE)
    ended = run("status", "--root", root)
    assert "trainer: x\\nsafe" in ended.stdout
    assert r"was skipped because the disk was full: x\nsafe" in ended.stdout
    assert r"failed: x\nsafe" in ended.stdout
    assert_nothing_forged(ended.stdout)
    with OnTerminal("status", "--root", root) as terminal:
        _, stdout, _ = terminal.end()
    assert "trainer: x\\nsafe" in bare(stdout)
    assert_nothing_forged(bare(stdout))
    assert_nothing_forged(run("retry", "--root", root).stderr)


def test_a_lock_of_others_is_named_on_one_line(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",))
    lock = RootLock(root)
    lock.acquire({"host": HOSTILE, HOSTILE: HOSTILE})
    try:
        assert_nothing_forged(run("rewind", "--root", root, "--step", "200").stderr)
    finally:
        lock.release()


def test_a_timeline_prints_one_line_for_each_event(tmp_path: Path) -> None:
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",))
    journal = Journal(root, HOSTILE)
    journal(events.SaveFailed(step=100, kinds=("model",), reason=HOSTILE))
    journal(events.MirrorCommitted(mirror=HOSTILE, step=100))
    ended = run("timeline", "--root", root)
    assert_nothing_forged(ended.stdout)
    assert_nothing_forged(ended.stderr)


def test_a_file_name_with_a_line_feed_is_spelled_out(tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_save(root, 200, kinds=("dcp",))
    (root / "dcp_000200" / HOSTILE).write_bytes(b"")
    ended = run("verify", root)
    assert_nothing_forged(ended.stdout + ended.stderr + r"x\nsafe: every save")
    assert_nothing_forged(run("ls", root / HOSTILE).stderr)


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(IntegrityError("a\nb\tc\x85d\u2028e")) == r"a\nb\tc\x85d\u2028e"
