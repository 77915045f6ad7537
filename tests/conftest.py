"""One seed for the whole run, chosen before its worker processes start, so that all of them collect the same tests."""

from __future__ import annotations

import os
import random

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the campaigns unless it is given; workers inherit it."""
    os.environ.setdefault("CKPTMIRROR_CAMPAIGN_SEED", str(random.SystemRandom().randrange(1_000_000)))


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed."""
    return f"campaign seed: {os.environ['CKPTMIRROR_CAMPAIGN_SEED']}"
