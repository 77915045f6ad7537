"""The site of the documentation: every page is in its navigation, every diagram can be drawn."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

import ckptmirror
from tests.integration.test_examples import PAGES, Block, blocks_of

HOME = Path(__file__).resolve().parents[2]
SITE = HOME / "docs" / "site"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[f"site_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


navigation, pictures = module("navigation"), module("pictures")
DIAGRAMS = [block for page in PAGES for block in blocks_of(page) if block.language == "mermaid"]


def listed_from(page: str) -> list[str]:
    groups = navigation.groups_of(page, (HOME / page).read_text())
    return [path for paths in groups.values() for path in paths]


def test_every_page_is_in_the_navigation_once():
    top = listed_from(navigation.NAVIGATION)
    below = [
        path for page in top if page.startswith("docs/") and page.endswith("/README.md") for path in listed_from(page)
    ]
    everything = [navigation.NAVIGATION, *top, *below]
    assert sorted(everything) == sorted(str(page.relative_to(HOME)) for page in PAGES)


def test_the_groups_have_names_and_the_guide_comes_first():
    groups = list(navigation.groups_of(navigation.NAVIGATION, (HOME / navigation.NAVIGATION).read_text()))
    assert groups == ["Guide", "Reference", "Design", "Compared", "The project"]


@pytest.mark.parametrize("block", DIAGRAMS, ids=lambda block: f"{block.page.stem}: {block.text.split()[-1]}")
def test_every_diagram_is_drawn_with_all_its_words(block: Block):
    shown = re.sub(r"\W+", "", "".join(ET.fromstring(pictures.draw(block.text)).itertext()))
    for line in block.text.splitlines():
        said = re.search(r'(?:: |as |id: |alt |else )"?([^"]+?)"?$', line)
        if said and "[*]" not in line:
            assert re.sub(r"\W+", "", said[1]) in shown, line


@pytest.mark.parametrize(
    "text",
    [
        "flowchart LR\n a --> b",
        "sequenceDiagram\n participant A\n A-xB: lost",
        "sequenceDiagram\n participant A\n alt x",
        "",
    ],
)
def test_what_cannot_be_drawn_is_an_error(text: str):
    with pytest.raises(ValueError, match="diagram"):
        pictures.draw(text)


def test_the_page_of_the_api_has_every_public_name():
    page = (HOME / "docs" / "reference" / "api.md").read_text()
    shown = set(re.findall(r"^\.\. auto(?:class|function):: ckptmirror\.(\w+)$", page, re.MULTILINE))
    assert shown == set(ckptmirror.__all__) - {"errors"}
    assert ".. automodule:: ckptmirror.core.errors" in page


def test_the_pages_are_in_the_source_archive_and_nothing_of_them_in_the_wheel():
    targets = tomllib.loads((HOME / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["ckptmirror"]}
    included = {path.split("/")[0] for path in targets["sdist"]["include"]}
    assert {page.relative_to(HOME).parts[0] for page in PAGES} <= included
