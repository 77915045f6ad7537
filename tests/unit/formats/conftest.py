"""Lets these tests use the states of the formats' contract tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))
