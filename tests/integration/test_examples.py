"""Every example in README.md and docs/ is run as it stands there, with its places moved into a temporary folder.

Rules:
* ``<!-- example: name -->`` stands above a block that is run; ``after other`` in it names an example, of another page,
  that is run first. The examples of one page are run in order, in one folder.
* ``needs program`` at its end names what must be installed; without it the example is skipped.
* ``/tmp/try`` in an example is that folder; its scripts lie there by their name, ``first_run.py``.
* ``<!-- not run: reason -->`` stands above one that is not.
* ``<!-- file: path -->`` stands above a file that test_contributing.py puts into a copy of the package.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptmirror.testing import GcsServerProcess
from tests.kit.cli import clean_environment

pytestmark = pytest.mark.long

HOME = Path(__file__).resolve().parents[2]
PAGES = [*sorted(HOME.glob("*.md")), *sorted((HOME / "docs").rglob("*.md")), HOME / "deploy" / "README.md"]
PLACES = ("/local-ssd", "/nfs", "/scratch")
LIMIT_S = 120.0
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
CODE = ("python", "sh")
# Not code of ours; a fence of any other language is an error.
TEXT = ("", "ini", "json", "toml", "mermaid", "{eval-rst}")
_MARKS = r"example: [a-z-]+( after [a-z-]+)?( needs [a-z]+)?|not run: .{10,}|file: ckptmirror/[a-z_/]+\.py"

# What stands around an example that is a fragment.
FRAGMENTS = {
    "training-loop": (
        "import torch\nfrom ckptmirror import CheckpointManager, Retention, TrainState\n"
        "model = torch.nn.Linear(4, 4)\nstep = 1\n"
        "state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))\n",
        "assert start is None\nmanager.close()\n",
    )
}


@dataclass(frozen=True)
class Block:
    page: Path
    mark: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return self.mark.removeprefix("example:").split()[0]

    @property
    def after(self) -> str:
        return self.mark.partition(" after ")[2].partition(" needs ")[0].strip()

    @property
    def needs(self) -> str:
        return self.mark.partition(" needs ")[2].strip()


def blocks_of(page: Path) -> list[Block]:
    found = _BLOCK.finditer(page.read_text())
    return [Block(page, match["mark"] or "", match["language"], match["text"]) for match in found]


EXAMPLES = [block for page in PAGES for block in blocks_of(page) if block.mark.startswith("example:")]


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServerProcess]:
    with GcsServerProcess(buckets=["bucket"]) as found:
        yield found


def run_block(block: Block, folder: Path, env: dict[str, str]) -> str:
    """Run one example; return its stdout."""
    before, behind = FRAGMENTS.get(block.name, ("", ""))
    text = (before + block.text + behind).replace("/tmp/try", "")
    for place in PLACES:
        text = text.replace(place, f"{folder}{place}")
    text = text.replace("gs://bucket", f"gs://bucket/{folder.name}")
    if block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", text]
    else:
        is_test = "\ndef test_" in text
        script = folder / f"{'test_' if is_test else ''}{block.name.replace('-', '_')}.py"
        script.write_text(text)
        command = [sys.executable, *(["-m", "pytest", "-q", "-p", "no:cacheprovider"] if is_test else []), str(script)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env=clean_environment(PATH=path, OMP_NUM_THREADS="1", PYTHONPATH=str(HOME), **env),
    )
    assert ended.returncode == 0, f"example {block.name}: {ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.mark.parametrize("page", sorted({block.page for block in EXAMPLES}), ids=lambda page: page.name)
def test_the_examples_of_a_page_run_as_they_stand_there(page: Path, tmp_path: Path, server: GcsServerProcess):
    for place in PLACES:
        (tmp_path / place.lstrip("/")).mkdir()
    done: dict[str, str] = {}
    for block in [block for block in EXAMPLES if block.page == page]:
        if block.needs and shutil.which(block.needs) is None:
            continue
        if block.after and block.after not in done:
            (needed,) = [other for other in EXAMPLES if other.name == block.after]
            done[needed.name] = run_block(needed, tmp_path, server.environment)
        done[block.name] = run_block(block, tmp_path, server.environment)
    last = done["eval-host"].strip() if page.name == "README.md" else ""
    if last:  # what the README says of it: stdout is exactly the path of a DCP directory
        assert last == f"{tmp_path}/scratch/eval/dcp_000100"
        assert (Path(last) / ".metadata").is_file()


def test_examples_have_names_of_their_own_and_the_readme_has_its_three():
    names = [block.name for block in EXAMPLES]
    assert len(names) == len(set(names))
    assert [b.name for b in EXAMPLES if b.page.name == "README.md" and b.page.parent == HOME] == [
        "training-loop",
        "whole-loop",
        "eval-host",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_every_block_of_code_is_run_or_says_why_not(page: Path):
    for block in blocks_of(page):
        assert block.language in CODE + TEXT, f"```{block.language}: is it code? {block.text}"
        if block.language in CODE:
            assert re.fullmatch(_MARKS, block.mark), block.text
        else:
            assert not re.search(r"^\s*(\$ |>>> |pip |gcloud |import |from \w+ import )", block.text, re.MULTILINE), (
                block.text
            )
        if block.language == "json":
            json.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_no_fence_of_a_page_escapes_the_eye_of_these_tests(page: Path):
    text = page.read_text()
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == 2 * len(blocks_of(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_every_link_to_a_page_leads_somewhere(page: Path):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", _without_blocks(page.read_text())):
        if "://" in target:
            continue
        leads_to = page.parent / target if target else page
        assert leads_to.is_file(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(leads_to), f"{page.name} links to {target}#{anchor}"


def _without_blocks(text: str) -> str:
    return _BLOCK.sub("", text)


def anchors_of(page: Path) -> set[str]:
    """What a forge and the site make of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page.read_text()), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_what_a_page_leaves_to_ci_is_what_ci_runs(page: Path):
    run_by_ci = re.findall(r"^make (?:-k )?(\w+)", (HOME / ".ci" / "run").read_text(), re.MULTILINE)
    for block in blocks_of(page):
        if block.mark.startswith("not run: CI runs"):
            assert set(re.findall(r"^make (\w+)", block.text, re.MULTILINE)) <= set(run_by_ci)
