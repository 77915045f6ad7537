"""The files of the ranks are those that the meta names, however many ranks it says that there were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptmirror.core.names import SaveName
from ckptmirror.formats.rank_files import rank_files
from tests.kit.cost import calls_of
from tests.kit.saves import make_save


@pytest.mark.parametrize("ranks", [3, 10_000_000])
def test_finding_the_files_costs_no_more_than_their_number(tmp_path: Path, ranks: int) -> None:
    """A meta of 2 KB that says 10,000,000 ranks took each rank of a start ten seconds, three times."""
    meta = replace(make_save(tmp_path, 200, ranks=3), world_size=ranks)
    found = rank_files(tmp_path, meta, SaveName(200).extra)
    assert found is not None
    assert found.ranks == [0, 1, 2]
    assert calls_of(lambda: rank_files(tmp_path, meta, SaveName(200).extra)) < 500


def test_a_rank_that_the_save_did_not_have_has_no_file(tmp_path: Path) -> None:
    meta = replace(make_save(tmp_path, 200, ranks=3), world_size=2)
    found = rank_files(tmp_path, meta, SaveName(200).extra)
    assert found is not None
    assert found.ranks == [0, 1]
