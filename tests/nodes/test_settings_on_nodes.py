"""A setting that is wrong on one rank of several ends the start of all ranks, at once and with its cause."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import ConfigError, RankFailed
from tests.kit.processes import outcome, run_ranks
from tests.nodes.jobs import WAIT_S

pytestmark = pytest.mark.long

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"signing_key": "/no/key.pem"}, "there is no /no/key.pem"),
    ({"mode": "fast"}, "mode is 'fast'"),
    ({"timeout_s": 0}, "timeout_s is 0"),
    ({"workers_per_mirror": 0}, "workers_per_mirror is 0"),
    ({"mirrors": ["gs://"]}, "gs://"),
    ({"root": "gs://bucket/run"}, "root is a gs:// URL"),
]


def open_with(rank: int, base: str, one: int) -> list[Any]:
    """Open a manager once for each wrong setting, which only one rank has; then a right one."""
    right = {"root": Path(base) / str(rank), "timeout_s": WAIT_S}
    raised = [
        outcome(lambda given=given: CheckpointManager(**{**right, **(given if rank == one else {})}))  # type: ignore[misc]
        for given, _ in WRONG
    ]
    CheckpointManager(**right).close()  # type: ignore[arg-type]
    return raised


@pytest.mark.parametrize("one", [0, 2])
def test_a_wrong_setting_of_one_rank_is_raised_on_all(one: int, tmp_path: Path) -> None:
    of_ranks = run_ranks(3, open_with, str(tmp_path), one, limit_s=WAIT_S / 2)
    for rank, raised in enumerate(of_ranks):
        wanted = (ConfigError if rank == one else RankFailed).__name__, ConfigError.exit_code
        for (kind, message, code), (_, words) in zip(raised, WRONG, strict=True):
            assert (kind, code) == wanted, message
            assert f"rank {one} on host {os.uname().nodename}: " in message
            assert words in message
