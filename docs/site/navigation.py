"""Reads the navigation of the site from the lists of links that the pages have anyway.

Rules:
* ``docs/README.md`` is the navigation: each ``##`` heading a group, each link to a page below it an entry, in this
  order and under these words. Links above the first heading are not part of it.
* A page named ``README.md`` deeper in ``docs/`` does the same for what it links to in its own folder.
* A page that nobody lists is an error, of the build and of ``tests/integration/test_site.py``.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

__all__ = ["NAVIGATION", "groups_of", "toctrees"]

NAVIGATION = "docs/README.md"
_LINK = re.compile(r"\[([^]]+)\]\(([^)#:\s]+\.md)\)")


def groups_of(page: str, text: str) -> dict[str, dict[str, str]]:
    """Return what ``page`` (a path from the repository's root) lists: for each heading, paths and their words."""
    folder = PurePosixPath(page).parent
    groups: dict[str, dict[str, str]] = {}
    seen: set[str] = set()
    before, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    for part in parts if page == NAVIGATION else [before, *parts]:
        heading, _, body = part.partition("\n")
        for words, target in _LINK.findall(body):
            path = _joined(folder, target)
            if path in seen or (page != NAVIGATION and PurePosixPath(path).parent != folder):
                continue
            seen.add(path)
            groups.setdefault(heading if page == NAVIGATION else "", {})[path] = words.replace("`", "")
    return groups


def _joined(folder: PurePosixPath, target: str) -> str:
    root = Path("/")
    return Path(root, folder, target).resolve().relative_to(root).as_posix()


def toctrees(page: str, text: str) -> str:
    """Return the directives that make Sphinx's navigation of what ``page`` lists; they show nothing in the page."""
    made = []
    for caption, paths in groups_of(page, text).items():
        entries = "\n".join(f"{words} </{path.removesuffix('.md')}>" for path, words in paths.items())
        option = f":caption: {caption}\n" if caption else ""
        made.append(f"\n```{{toctree}}\n:hidden:\n{option}\n{entries}\n```\n")
    return "".join(made)
