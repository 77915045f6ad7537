"""Prints the lowest version of each declared dependency as a constraint, for `make test-lowest`.

torch is left to constraints.txt: its index has a build without CUDA of few versions. `make test-torch` tries another.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def lowest() -> dict[str, str]:
    """Return the lower bound of each dependency, by name."""
    found = {}
    for requirement in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["testing"]]:
        bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)
        assert bound is not None, f"{requirement} has no lower bound, or more than one"
        found[bound[1]] = bound[2]
    return found


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in lowest().items() if name != "torch"))
