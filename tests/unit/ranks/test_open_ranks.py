"""Which channel a process gets that has not joined a process group."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks import SingleRank, open_ranks


def test_a_rank_that_torchrun_started_and_that_joined_no_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="rank 1 of 2, but") as refused:
        open_ranks(node_key="a")
    assert "init_process_group" in refused.value.hint


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "2"}, {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1"}])
def test_any_other_process_is_the_one_rank_of_its_job(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert isinstance(open_ranks(node_key="a"), SingleRank)
