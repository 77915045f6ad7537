"""Progress as a person sees it on a terminal and in a file: real verbs, a server that is slow, stalls or is down."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmirror.cli._progress import LINE_EVERY_S
from ckptmirror.testing import Fault, GcsServerProcess
from tests.kit.cli import LIMIT_S, clean_environment, run
from tests.kit.roots import make_pending
from tests.kit.terminal import HIDE_CURSOR, SHOW_CURSOR, OnTerminal, bare, screen

pytestmark = pytest.mark.long

URL = "gs://test-bucket/run"
SIZE_BYTES = 600_000
ALL = "585.9 KiB"

# A verb whose plain lines come ten times a second.
HASTY = """
import sys
from ckptmirror.cli import _progress
_progress.LINE_EVERY_S = 0.1
from ckptmirror.cli import main
sys.exit(main())
"""


def slow(operation: str, bytes_per_s: float = 200_000) -> Fault:
    return Fault(operation=operation, object="model_", times=0, slow_bytes_per_s=bytes_per_s)


def on_mirror(folder: Path, server: GcsServerProcess) -> Path:
    """A root whose save is on the server."""
    root, _ = make_pending(folder, URL, 200, kinds=("model",), size_bytes=SIZE_BYTES, sidecars=False)
    assert run("drain", "--root", root, env=server.environment).returncode == 0
    return root


def stage(dest: Path) -> list[str | Path]:
    return ["stage", "--step", "200", "--mirror", URL, "--dest", dest]


def in_a_pipe(*arguments: str | Path, server: GcsServerProcess, more: dict[str, str] | None = None) -> list[str]:
    """The lines of a hasty verb whose stderr is no terminal."""
    environment = clean_environment(**server.environment, **(more or {}))
    command = [sys.executable, "-c", HASTY, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "\x1b" not in ended.stderr
    return ended.stderr.splitlines()


# -- on a terminal ------------------------------------------------------------------------------------------


def test_a_stage_shows_its_total_before_the_first_byte_then_speed_and_time_left(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    on_mirror(tmp_path, gcs_server)
    gcs_server.faults([Fault(operation="object.media", object="model_", stall_s=1.5)])
    with OnTerminal(*stage(tmp_path / "e"), env=gcs_server.environment) as terminal:
        terminal.until(rf"stage .* 0 B of {ALL}")
        exit_code, stdout, shown = terminal.end()
    assert (exit_code, stdout) == (0, f"{tmp_path}/e/model_000200.pt\n")
    assert HIDE_CURSOR in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)


def test_a_drain_adds_up_all_uploads_and_says_speed_and_time_left(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    size_bytes = 12 * 1024 * 1024
    root, _ = make_pending(tmp_path, URL, 100, 200, kinds=("model",), size_bytes=size_bytes, sidecars=False)
    limited = f'mirrors = [{{ url = "{URL}", bytes_per_s = 6e6 }}]'
    (tmp_path / "ckptmirror.toml").write_text(limited)
    with OnTerminal("drain", "--root", root, env=gcs_server.environment, cwd=tmp_path) as terminal:
        terminal.until(r"0 B of 24.0 MiB")
        terminal.until(r"sending 2 files")
        found = terminal.until(r"drain .* ([0-9.]+) MiB of 24.0 MiB +([0-9.]+) MiB/s +[0-9]+ s left")
        exit_code, stdout, shown = terminal.end()
    assert exit_code == 0
    assert stdout.startswith("4 of 4 files verified")
    assert 0 < float(found[1]) < 24
    amounts = {float(amount) for amount in re.findall(r"([0-9.]+) MiB of 24", bare(shown))}
    assert amounts - {0.0, 12.0, 24.0}, "bytes of files that are under way count"
    assert max(amounts) <= 24.0


def test_what_is_sent_and_not_yet_verified_is_said_to_be_verified(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    root, _ = make_pending(tmp_path, URL, 100, kinds=("model",), size_bytes=SIZE_BYTES, sidecars=False)
    gcs_server.faults([Fault(operation="object.get", object="model_", nth=2, stall_s=2.0)])  # the question afterwards
    with OnTerminal("drain", "--root", root, env=gcs_server.environment) as terminal:
        terminal.until(r"verifying 1 file on the mirror")
        assert terminal.end()[0] == 0


@pytest.mark.parametrize("verb", ["stage", "drain", "verify", "push"])
def test_a_mirror_that_does_not_answer_is_waited_for_with_a_countdown(
    verb: str,
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    root = on_mirror(tmp_path, gcs_server)
    gcs_server.faults([Fault(status=503, retry_after_s=3)])
    arguments = {
        "stage": stage(tmp_path / "e"),
        "drain": ["drain", "--root", root],
        "verify": ["verify", URL, "--deep"],
        "push": ["push", "--root", root, "--mirror", URL],
    }[verb]
    with OnTerminal(*arguments, env=gcs_server.environment) as terminal:
        terminal.until(rf"waiting for {URL} \(retry in [123] s\): \w+")
        exit_code, _, shown = terminal.end()
    assert exit_code == 0, bare(shown)
    left_s = re.findall(r"retry in ([0-9]+) s", bare(shown))
    assert left_s == sorted(left_s, reverse=True)


def test_a_drain_sees_a_mirror_go_down_and_come_back(gcs_server: GcsServerProcess, tmp_path: Path):
    root, _ = make_pending(tmp_path, URL, 200, kinds=("model",), size_bytes=SIZE_BYTES, sidecars=False)
    gcs_server.kill()
    with OnTerminal("drain", "--root", root, env=gcs_server.environment) as terminal:
        terminal.until(rf"waiting for {URL} \(retry in [0-9]+ s\)")
        gcs_server.start()
        exit_code, stdout, shown = terminal.end()
    assert exit_code == 0, bare(shown)
    assert stdout.startswith("2 of 2 files verified")


def test_a_deep_verification_shows_bytes_of_all(gcs_server: GcsServerProcess, tmp_path: Path):
    on_mirror(tmp_path, gcs_server)
    gcs_server.faults([slow("object.media", 400_000)])
    with OnTerminal("verify", URL, "--deep", env=gcs_server.environment) as terminal:
        terminal.until(rf"verify .* 0 B of {ALL}")
        exit_code, stdout, _ = terminal.end()
    assert exit_code == 0
    assert "every byte" in stdout


def test_ctrl_c_leaves_the_cursor_visible_and_no_bar(gcs_server: GcsServerProcess, tmp_path: Path):
    on_mirror(tmp_path, gcs_server)
    gcs_server.faults([slow("object.media", 200)])  # the rest would take an hour
    with OnTerminal(*stage(tmp_path / "e"), env=gcs_server.environment) as terminal:
        terminal.until(rf"0 B of {ALL}")
        terminal.process.send_signal(signal.SIGINT)
        exit_code, stdout, shown = terminal.end()
    assert (exit_code, stdout) == (130, "")
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR)
    assert shown.splitlines()[-1].endswith("ckptmirror: interrupted; the same command continues where it stopped.")


def test_what_is_said_at_a_typed_ctrl_c_has_a_line_of_its_own(gcs_server: GcsServerProcess, tmp_path: Path):
    on_mirror(tmp_path, gcs_server)
    gcs_server.faults([slow("object.media", 20_000)])  # the download outlasts the two seconds that a verb has to leave
    with OnTerminal(*stage(tmp_path / "e"), env=gcs_server.environment) as terminal:
        terminal.until(rf"0 B of {ALL}")
        terminal.type("\x03")
        terminal.until(r"\^C")
        exit_code, _, shown = terminal.end()
    assert exit_code == 130
    assert screen(shown)[-2:] == ["ckptmirror: interrupted; the same command continues where it stopped.", ""], shown


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_typed_ctrl_c_without_a_bar_leaves_the_sentence_on_a_line_of_its_own(term: str, tmp_path: Path):
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        OnTerminal(
            *("ls", URL), env={"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{silent.getsockname()[1]}", "TERM": term}
        ) as terminal,
    ):
        silent.accept()[0].close()
        terminal.type("\x03")
        exit_code, _, shown = terminal.end()
    assert exit_code == 130
    assert "^C" in shown
    assert screen(shown)[-2:] == ["ckptmirror: interrupted; the same command continues where it stopped.", ""], shown


def test_a_bar_fits_the_terminal_also_when_that_becomes_narrow(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    on_mirror(tmp_path, gcs_server)
    gcs_server.faults([slow("object.media", 200_000)])
    with OnTerminal(*stage(tmp_path / "e"), env=gcs_server.environment, columns=100) as terminal:
        terminal.until(rf"0 B of {ALL}")
        terminal.resize(44)
        seen = len(terminal.shown)
        exit_code, _, shown = terminal.end()
    assert exit_code == 0
    frames = [line for line in re.split(r"[\r\n]+", bare(shown[seen:])) if line.strip()]
    assert frames[1:], "it was drawn after the change"
    assert all(len(line.rstrip()) <= 44 for line in frames[1:]), frames


def test_no_color_means_no_colour(gcs_server: GcsServerProcess, tmp_path: Path):
    on_mirror(tmp_path, gcs_server)

    def colours(**more: str) -> set[str]:
        with OnTerminal(*stage(tmp_path / f"e{len(more)}"), env=gcs_server.environment | more) as terminal:
            exit_code, _, shown = terminal.end()
        assert exit_code == 0
        return set(re.findall(r"\x1b\[[0-9;]*(?:3[0-9]|9[0-7]|38;[0-9;]+)m", shown))

    assert colours()
    assert not colours(NO_COLOR="1")


def test_a_dumb_terminal_gets_plain_lines(gcs_server: GcsServerProcess, tmp_path: Path):
    on_mirror(tmp_path, gcs_server)
    with OnTerminal(*stage(tmp_path / "e"), env=gcs_server.environment | {"TERM": "dumb"}) as terminal:
        assert terminal.end() == (0, f"{tmp_path}/e/model_000200.pt\n", "")


# -- elsewhere ----------------------------------------------------------------------------------------------


def test_elsewhere_there_are_plain_lines_and_a_last_one_that_says_how_it_went(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    assert LINE_EVERY_S == 30.0
    root, _ = make_pending(tmp_path, URL, 200, kinds=("model",), size_bytes=12 * 1024 * 1024, sidecars=False)
    gcs_server.faults([slow("upload.put", 8_000_000)])
    lines = in_a_pipe("drain", "--root", root, server=gcs_server)
    pattern = r"drain: [0-9.]+ M?i?B of 12.0 MiB, [0-9.]+ MiB/s, [0-9]+ s left, sending 1 file"
    assert any(re.fullmatch(pattern, line) for line in lines), lines
    assert re.fullmatch(r"drain: 12.0 MiB moved in [0-9.]+ s, [0-9.]+ MiB/s", lines[-1])
    gcs_server.clear_faults()
    assert run("verify", URL, env=gcs_server.environment).stderr == "1 of 1 saves are whole\n", (
        "a short one says nothing"
    )


def test_json_leaves_stdout_alone_and_progress_where_it_is(gcs_server: GcsServerProcess, tmp_path: Path):
    on_mirror(tmp_path, gcs_server)
    gcs_server.faults([slow("object.media", 600_000)])
    lines = in_a_pipe(*stage(tmp_path / "e"), "--json", server=gcs_server)
    assert lines[0].startswith("stage: ")


def test_a_continued_upload_begins_at_what_the_mirror_has_and_its_speed_does_not_count_that(
    gcs_server: GcsServerProcess,
    tmp_path: Path,
):
    size_bytes = 40 * 1024 * 1024
    root, _ = make_pending(tmp_path, URL, 200, kinds=("model",), size_bytes=size_bytes, sidecars=False)
    gcs_server.faults([slow("upload.put", 16_000_000)])
    with OnTerminal("drain", "--root", root, env=gcs_server.environment) as terminal:
        terminal.until(r"[23][0-9]\.[0-9] MiB of 40.0 MiB")
        os.kill(terminal.process.pid, signal.SIGKILL)
    lines = in_a_pipe("drain", "--root", root, server=gcs_server)
    first = next(found for line in lines if (found := re.match(r"drain: ([0-9.]+) MiB of 40.0 MiB", line)))
    moved = re.fullmatch(r"drain: ([0-9.]+) MiB moved in .*", lines[-1])
    assert moved is not None
    assert float(moved[1]) <= 39.0
    assert float(first[1]) >= 40.0 - float(moved[1]) - 0.1


def test_a_log_line_stands_above_the_bar(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 200, kinds=("model",), size_bytes=SIZE_BYTES)
    assert run("drain", "--root", root).returncode == 0
    (tmp_path / "mirror" / "model_000200.pt").unlink()
    with OnTerminal("drain", "--root", root, columns=300) as terminal:  # so that the line does not wrap
        exit_code, _, shown = terminal.end()
    assert exit_code == 0
    logged = [line for line in re.split(r"[\r\n]+", bare(shown)) if "will be sent again" in line]
    assert logged
    assert all("MiB" not in line and "drain" not in line for line in logged), logged
