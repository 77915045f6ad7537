"""One seed for the whole run, chosen before its worker processes start, so that all of them collect the same tests.

Hypothesis fails no test because the machine is slow or busy. SIGINT is heard, also where the caller ignores it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the campaigns unless it is given; workers inherit it."""
    os.environ.setdefault("CKPTMIRROR_CAMPAIGN_SEED", str(random.SystemRandom().randrange(1_000_000)))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A script that runs the tests in the background ignores SIGINT, and so would the tests and all that they start."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed."""
    return f"campaign seed: {os.environ['CKPTMIRROR_CAMPAIGN_SEED']}"
