"""Which ranks are one node."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptmirror.ranks
from ckptmirror import CheckpointManager
from tests.kit.processes import outcome, run_ranks
from tests.kit.roots import leftovers
from tests.kit.training import everything, new_state, same, train

pytestmark = pytest.mark.long


def open_and_close(rank: int, roots: list[str]) -> tuple[str, str, int]:
    def job() -> int:
        manager = CheckpointManager(roots[rank], kinds=("model",), timeout_s=30.0)
        try:
            return manager.ranks.nodes
        finally:
            manager.close()

    return outcome(job)


def test_ranks_with_roots_of_their_own_are_nodes(tmp_path: Path) -> None:
    found = run_ranks(2, open_and_close, [str(tmp_path / "first"), str(tmp_path / "second")])
    assert [(kind, message) for kind, message, _ in found] == [("value", "2")] * 2


def on_host(number: int, base: Path) -> None:
    """Let this process be on a host of its own, as far as its roots tell."""
    boot_id = base / f"boot-{number}"
    boot_id.write_text(f"host {number}")
    ckptmirror.ranks._BOOT_ID = boot_id


def open_on_hosts(rank: int, base: str, roots: list[str]) -> tuple[str, str, int]:
    on_host(rank, Path(base))
    return open_and_close(rank, roots)


def test_ranks_on_three_hosts_with_one_shared_root_are_one_node(tmp_path: Path) -> None:
    root = tmp_path / "root"
    found = run_ranks(3, open_on_hosts, str(tmp_path), [str(root)] * 3)
    assert [(kind, message) for kind, message, _ in found] == [("value", "1")] * 3
    assert leftovers(root) == []


def test_a_root_shared_by_two_of_three_hosts_makes_two_nodes(tmp_path: Path) -> None:
    found = run_ranks(3, open_on_hosts, str(tmp_path), [str(tmp_path / name) for name in ("one", "two", "one")])
    assert [(kind, message) for kind, message, _ in found] == [("value", "2")] * 3
    assert [leftovers(tmp_path / name) for name in ("one", "two")] == [[], []]


def save_then_resume(rank: int, base: str) -> tuple[int, bool]:
    on_host(rank, Path(base))
    state = new_state()
    with CheckpointManager(Path(base) / "root", timeout_s=30.0) as manager:
        manager.resume(state)
        train(state)
        manager.save(1, state).wait()
    saved = everything(state)
    fresh = new_state(seed=1)
    with CheckpointManager(Path(base) / "root", timeout_s=30.0) as manager:
        info = manager.resume(fresh)
    return info.step if info is not None else 0, same(everything(fresh), saved)


def test_hosts_with_one_shared_root_save_and_resume_together(tmp_path: Path) -> None:
    assert run_ranks(2, save_then_resume, str(tmp_path)) == [(1, True)] * 2


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
