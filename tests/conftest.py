"""One seed for the whole run, chosen before its worker processes start, so that all of them collect the same tests.

Hypothesis fails no test because the machine is slow or busy.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the campaigns unless it is given, and no patience for minutes; workers inherit both."""
    os.environ.setdefault("CKPTMIRROR_RETRY_S", "8")
    os.environ.setdefault("CKPTMIRROR_CAMPAIGN_SEED", str(random.SystemRandom().randrange(1_000_000)))


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed."""
    return f"campaign seed: {os.environ['CKPTMIRROR_CAMPAIGN_SEED']}"
