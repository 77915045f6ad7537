"""Which rank has which stage."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import ConfigError
from ckptmirror.core.stages import NO_STAGES, stages_of


def test_ranks_without_stages_are_all_peers() -> None:
    assert stages_of([None, None]) == NO_STAGES
    assert NO_STAGES.of(1) is None
    assert NO_STAGES.peers(1, 3) == (0, 1, 2)


def test_ranks_of_one_stage_are_peers() -> None:
    stages = stages_of([0, 7, 0, 7])
    assert [stages.of(rank) for rank in range(4)] == [0, 7, 0, 7]
    assert stages.peers(3, 4) == (1, 3)


def test_a_rank_without_a_stage_beside_others_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="Rank 1 has no pp_rank"):
        stages_of([0, None])
