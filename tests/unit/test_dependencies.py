"""What the package imports is declared, and what is declared is imported: a wheel installs all that runs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
PACKAGE = HOME / "ckptmirror"
PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
FIXTURES = PACKAGE / "testing" / "fixtures.py"  # for the tests of users, who install the extra "testing"


def names_of(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in requirements}


ALWAYS = names_of(PROJECT["dependencies"])
FOR_TESTS = names_of(PROJECT["optional-dependencies"]["testing"])


def imports_in(path: Path) -> Iterator[set[str]]:
    """For each import from elsewhere: the modules of which one has it (``from a import b`` means ``a``, or ``a.b``)."""
    own = {"ckptmirror", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ({alias.name} for alias in node.names if alias.name.partition(".")[0] not in own)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] not in own:
            yield from ({node.module, f"{node.module}.{alias.name}"} for alias in node.names)


@cache
def modules_of(distribution: str) -> frozenset[str]:
    """The modules that a distribution installs: several share the package ``google``."""
    files = [file for file in metadata.files(distribution) or () if file.suffix in (".py", ".so")]
    assert files, f"{distribution} is not installed"
    paths = [(*file.parts[:-1], file.name.partition(".")[0]) for file in files]
    return frozenset(".".join(path[:-1] if path[-1] == "__init__" else path) for path in paths)


def test_everything_that_the_package_imports_is_declared():
    undeclared = {}
    for path in PACKAGE.rglob("*.py"):
        declared = frozenset().union(*map(modules_of, ALWAYS | (FOR_TESTS if path == FIXTURES else set())))
        if missing := [sorted(modules) for modules in imports_in(path) if declared.isdisjoint(modules)]:
            undeclared[str(path.relative_to(HOME))] = missing
    assert not undeclared, undeclared


def test_everything_that_is_declared_is_imported():
    imported = set().union(*(modules for path in PACKAGE.rglob("*.py") for modules in imports_in(path)))
    assert {name for name in ALWAYS | FOR_TESTS if modules_of(name).isdisjoint(imported)} == set()
