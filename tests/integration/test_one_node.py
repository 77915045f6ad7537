"""Which ranks are one node, and what a job of several nodes is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmirror import CheckpointManager
from ckptmirror.core.errors import ConfigError
from tests.kit.processes import outcome, run_ranks

pytestmark = pytest.mark.long


def open_and_close(rank: int, roots: list[str]) -> tuple[str, str, int]:
    def job() -> int:
        manager = CheckpointManager(roots[rank], kinds=("model",), timeout_s=30.0)
        try:
            return manager.ranks.nodes
        finally:
            manager.close()

    return outcome(job)


def test_a_job_of_several_nodes_is_refused_on_every_rank(tmp_path: Path) -> None:
    found = run_ranks(2, open_and_close, [str(tmp_path / "first"), str(tmp_path / "second")])
    for kind, message, code in found:
        assert (kind, code) == (ConfigError.__name__, ConfigError.exit_code)
        assert "several nodes" in message


@pytest.mark.parametrize("exists", [True, False])
def test_ranks_that_spell_one_root_differently_are_one_node(tmp_path: Path, exists: bool) -> None:
    parent = tmp_path / "disk"
    parent.mkdir()
    (tmp_path / "alias").symlink_to("disk")
    if exists:
        (parent / "root").mkdir()
    found = run_ranks(2, open_and_close, [str(parent / "root"), str(tmp_path / "alias" / "root")])
    assert [(kind, message) for kind, message, _ in found] == [("value", "1")] * 2


def test_a_root_that_cannot_be_made_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run_ranks(2, open_and_close, [str(tmp_path / "root"), str(tmp_path / "file" / "root")])
    assert all(kind != "value" for kind, *_ in found)


def test_two_spellings_of_one_root_are_one_node(tmp_path: Path) -> None:
    from ckptmirror.arguments import node_key

    (tmp_path / "root").mkdir()
    (tmp_path / "alias").symlink_to("root")
    key, failure = node_key(tmp_path / "root")
    assert node_key(tmp_path / "alias") == (key, None)
    assert failure is None
    (tmp_path / "file").write_text("")
    assert node_key(tmp_path / "file" / "root")[1] is not None
