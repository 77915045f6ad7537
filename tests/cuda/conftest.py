"""Tests of what only a GPU shows: run them there with `make test-cuda`; elsewhere they are skipped."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # two runs of one training are equal only with it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test of this folder where there is no GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
