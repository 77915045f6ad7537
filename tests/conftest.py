"""One seed for the whole run, chosen before its worker processes start, so that all of them collect the same tests.

While tests that failed last are remembered, the seed is theirs: some are named after it, and `make test-again` has to
find them. Hypothesis fails no test because the machine is slow. SIGINT is heard, also where the caller ignores it.
Byte code is kept, also where the caller wants none: tests start thousands of processes that import the same modules.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_SEED = "ckptmirror/campaign-seed"
_LONGEST = ("tests/unit/core/start/", "tests/simulation/", "tests/integration/test_wheel.py", "tests/nodes/")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of the campaigns unless it is given, and no patience for minutes; workers inherit both."""
    os.environ.setdefault("CKPTMIRROR_RETRY_S", "8")
    cache = getattr(config, "cache", None)  # None with -p no:cacheprovider
    failed = cache is not None and cache.get("cache/lastfailed", {})
    seed = cache.get(_SEED, "") if failed else ""
    seed = os.environ.setdefault("CKPTMIRROR_CAMPAIGN_SEED", seed or str(random.SystemRandom().randrange(1_000_000)))
    if cache is not None and not hasattr(config, "workerinput"):
        cache.set(_SEED, seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that at the end no process is busy alone."""
    items.sort(key=lambda item: not item.nodeid.startswith(_LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """A script that runs the tests in the background ignores SIGINT, and so would the tests and all that they start."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.fixture(autouse=True)
def _log_level_is_kept() -> Iterator[None]:
    """`--verbose` sets the level of the root logger: no test that runs a verb in its own process changes the next."""
    earlier = logging.getLogger().level
    yield
    logging.getLogger().setLevel(earlier)


@pytest.fixture
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Mount a tmpfs with the given options, or an ext4 of so many KiB whose blocks have 1 KiB, and return where."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    places: list[Path] = []

    def mount(options: str = "", ext4_kib: int = 0) -> Path:
        place = tmp_path_factory.mktemp("mounted")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if ext4_kib:
            image = tmp_path_factory.mktemp("image") / "ext4"
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("making an ext4 needs mkfs.ext4")
            make = ["mkfs.ext4", "-q", "-m", "0", "-b", "1024", str(image), f"{ext4_kib}k"]
            subprocess.run(make, check=True, capture_output=True)
            command = ["mount", "-o", "loop", str(image), str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this machine does not allow mounting: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


def pytest_report_header(config: pytest.Config) -> str:
    """Say the seed."""
    return f"campaign seed: {os.environ['CKPTMIRROR_CAMPAIGN_SEED']}"
