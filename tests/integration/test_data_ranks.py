"""Jobs of two, three and one ranks, each with workers, read an epoch between them: every sample once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.data_ranks_job import SAMPLES, train
from tests.kit.processes import run_ranks

pytestmark = pytest.mark.long


@pytest.fixture(params=["samples", "shards"])
def which(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def jobs(which: str, tmp_path: Path) -> list[list[dict[str, Any]]]:
    for number in range(7):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}/{at}\n" for at in range(5 + number)))
    where = (str(tmp_path / "root"), str(tmp_path), which)
    return [
        run_ranks(2, train, *where, 1, 3),
        run_ranks(3, train, *where, 2, 2),
        run_ranks(1, train, *where, 3, None),
    ]


def test_every_sample_comes_once_on_two_then_three_then_one_rank(which: str, jobs: list[list[dict[str, Any]]]) -> None:
    seen = Counter(sample for job in jobs for rank in job for sample in rank["got"])
    everything = range(SAMPLES) if which == "samples" else [f"{n}/{at}" for n in range(7) for at in range(5 + n)]
    assert seen == Counter(everything)
    assert [len(rank["got"]) for rank in jobs[1]] == [4, 4, 4]
    assert jobs[2][0]["epoch"] == 1
    assert [line for job in jobs for rank in job for line in rank["missing"] if not line.startswith("rng")] == []
    assert jobs[2][0]["tokens"] == len(everything), "a value of extra is merged by its function"
