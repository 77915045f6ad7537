"""The tables of ``ls``, ``status`` and ``verify``: for a person on a terminal, and for a script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptmirror.cli._human_text import age_text
from tests.kit.cli import run
from tests.kit.roots import fail_uploads, make_mirrored, make_pending, require
from tests.kit.saves import make_save
from tests.kit.terminal import OnTerminal, bare

COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-9]|9[0-7])m")


def shown(*arguments: str | Path, columns: int = 120, **env: str) -> str:
    with OnTerminal(*arguments, stdout_too=True, columns=columns, env=env) as terminal:
        exit_code, _, text = terminal.end()
    assert exit_code == 0, text
    return text


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in bare(text).replace("\r", "").splitlines()]


def test_ls_on_a_terminal_has_heads_colours_and_ages(tmp_path: Path):
    root, url, metas = make_mirrored(tmp_path, 100, 200, kinds=("model",), created_at_utc="2026-01-02T03:04:05Z")
    for place in (root, url):
        text = shown("ls", place)
        head, first, second = lines(text)
        assert head.split() == ["STEP", "KIND", "SIZE", "STANDING", "SAVE", "AGE"]
        assert re.fullmatch(rf" *100  model +\S+ \S+  current +{metas[0].save_id[:8]}  \d+ d ago", first), first
        assert first.index("model") == head.index("KIND") == second.index("model")
        assert COLOUR.search(text)


def test_status_on_a_terminal_says_in_colour_what_is_not_safe(tmp_path: Path):
    created = "2026-01-02T03:04:05Z"
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",), created_at_utc=created)
    text = shown("status", root, columns=250)
    verdict, _, head, row = lines(text)
    assert verdict.startswith("NOT SAFE: 5 files")
    assert head.split() == ["STEP", "KIND", "SIZE", "STANDING", "SAVE", "AGE", "ON", "THE", "MIRRORS"]
    assert re.search(r" d ago  file://\S+: 5 of 5 files", row), row
    red = COLOUR.search(text)
    assert red is not None
    assert red[0].endswith("31m")
    assert run("drain", root).returncode == 0
    assert COLOUR.findall(shown("status", root))[0].endswith("32m"), "safe is green"


def test_no_color_leaves_a_table_without_colours_and_a_dumb_terminal_one_without_codes(tmp_path: Path):
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    assert not COLOUR.search(shown("ls", root, NO_COLOR="1"))
    dumb = shown("ls", root, TERM="dumb")
    assert "\x1b" not in dumb
    assert "STANDING" in dumb


@pytest.mark.parametrize("verb", ["ls", "status", "verify"])
def test_elsewhere_there_are_columns_without_head_colour_or_age(verb: str, tmp_path: Path):
    created = "2026-01-02T03:04:05Z"
    root, url, metas = make_mirrored(tmp_path, 100, 2000, kinds=("model",), created_at_utc=created)
    require(root, url)
    ended = run(verb, root, env={"FORCE_COLOR": "1", "COLUMNS": "40"})
    assert ended.returncode == 0
    assert "\x1b" not in ended.stdout
    rows = [line for line in ended.stdout.splitlines() if "model" in line]
    assert [row[:9] for row in rows] == ["      100", "     2000"]
    assert all(row.split()[1:5] == ["model", "11.7", "KiB", "current"] for row in rows)
    assert (metas[0].save_id[:8] in rows[0]) == (verb != "status")
    assert " ago" not in ended.stdout
    assert "STEP" not in ended.stdout


def test_what_a_mirror_says_moves_no_cursor_in_a_table(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    fail_uploads(root, "model_000100.pt", reason="refused \x1b[2J\x1b]0;title\x07 [bold]")
    text = shown("status", root, columns=250)
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text
    assert "[bold]" in text


def test_a_long_reason_is_folded_and_the_columns_before_it_stay_whole(tmp_path: Path):
    root, _ = make_pending(tmp_path, f"file://{tmp_path}/mirror", 100, kinds=("model",))
    fail_uploads(root, "model_000100.pt", reason="refused " * 20)
    rows = lines(shown("status", root, columns=80))
    assert all(len(line) <= 80 for line in rows[1:])
    assert any(re.match(r" *100  model +\S+ KiB  current ", line) for line in rows)
    assert "".join(re.sub(r"\s", "", row) for row in rows).count("refused") == 20


def test_a_command_in_the_first_line_of_status_can_be_pasted_however_narrow_the_terminal(tmp_path: Path):
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    require(root, f"file://{tmp_path}/mirror")
    assert f"`ckptmirror drain --root {root}`" in lines(shown("status", root, columns=50))[0]


def test_verify_says_damage_in_red(tmp_path: Path):
    root = tmp_path / "root"
    make_save(root, 100, ("model",))
    (root / "model_000100.pt").unlink()
    with OnTerminal("verify", root, stdout_too=True, columns=250) as terminal:
        exit_code, _, text = terminal.end()
    assert exit_code == 6
    assert re.search(r"\x1b\[31mDAMAGED: model_000100.pt", text), text


@pytest.mark.parametrize(
    ("at", "text"),
    [
        ("2026-01-02T03:04:00Z", "just now"),
        ("2026-01-02T03:03:40.500Z", "20 s ago"),
        ("2026-01-02T03:00:00+00:00", "4 min ago"),
        ("2026-01-02T00:00:00Z", "3 h ago"),
        ("2025-12-01T00:00:00Z", "32 d ago"),
        ("2026-01-02T03:04:30Z", "just now"),
        ("2026-01-02T09:00:00Z", "2026-01-02T09:00:00Z"),
        ("", ""),
        ("yesterday", ""),
    ],
)
def test_an_age_is_for_people(at: str, text: str):
    assert age_text(at, 1767323040.0) == text
