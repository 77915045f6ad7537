"""Every text of a module of the package: its messages, before values are put into them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def texts_of(path: Path, value: str) -> Iterator[str]:
    """The texts of a module; in an f-string, ``value`` stands for each of its values."""
    tree = ast.parse(path.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value
