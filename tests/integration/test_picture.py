"""The picture of the README: the command that draws it works, and what it drew is there."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cli import run
from tests.kit.roots import make_mirrored, require

HOME = Path(__file__).resolve().parents[2]
RASTER = HOME / "docs" / "site" / "raster.py"


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_readme_shows_the_picture_and_it_is_small():
    readme = (HOME / "README.md").read_text()
    found = re.search(r"!\[([^\]]{40,})\]\((docs/timeline\.png)\)", readme)
    assert found, "with a text for those who do not see it"
    png = (HOME / found[2]).read_bytes()
    assert len(png) < 200_000
    assert size_of(png)[0] > 1500


def test_a_drawn_timeline_becomes_a_png_twice_as_fine(tmp_path: Path):
    pytest.importorskip("resvg_py", reason="it is of the extra `docs`, which `make docs` and `make picture` install")
    root, url, _ = make_mirrored(tmp_path, 100, kinds=("model",))
    require(root, url)
    svg, png = tmp_path / "run.svg", tmp_path / "run.png"
    assert run("timeline", "--root", root, "--out", svg).returncode == 0
    subprocess.run([sys.executable, RASTER, svg, png], check=True)
    width, height = map(int, re.findall(r'<svg [^>]*width="(\d+)" height="(\d+)"', svg.read_text())[0])
    assert size_of(png.read_bytes()) == (2 * width, 2 * height)


def test_the_target_that_draws_it_uses_options_that_there_are():
    recipe = (HOME / "Makefile").read_text().partition("\npicture:")[2].partition("\n\n")[0]
    assert "ckptmirror demo --timeline build/timeline.svg" in recipe
    assert "docs/site/raster.py build/timeline.svg docs/timeline.png" in recipe
    assert "--timeline FILE.svg" in run("demo", "--help").stdout
