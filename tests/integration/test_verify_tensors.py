"""Verify with `--tensors`: what is in the files is what memory held as they were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.flow.verify.verify import Target, VerifiedSave, verify
from ckptmirror.formats import artifacts, dcp, live_sums, sidecars
from tests.integration import per_rank_job
from tests.kit.cli import assert_tells, run
from tests.kit.faults import flip_bit
from tests.kit.formats import make_state, train
from tests.kit.processes import run_ranks
from tests.kit.roots import make_mirrored

WRONG = "head.weight"


def saved(root: Path, *mirrors: str, kinds: Any = ("dcp", "model")) -> None:
    """A state with tensors of many dtypes, tied and empty ones, values in nested containers, and an average."""
    state = make_state()
    train(state, 2)
    with CheckpointManager(root, mirrors, kinds=kinds) as manager:
        manager.resume(state)
        manager.save(2, state).wait()


def checked(target: Target) -> VerifiedSave:
    (save,) = verify(target, tensors=True).saves
    assert save.tensors is not None
    return save


def listed(root: Path) -> set[str]:
    """The names that the lists of a root have, but for settings of the optimizer and what has no value."""
    found = [json.loads(path.read_bytes())["tensors"] for path in root.rglob("tensors_*")]
    entries = [one for of_rank in found for one in of_rank]
    return {one["name"] for one in entries if "param_groups" not in one["name"] and all(one["shape"])}


def test_every_tensor_of_each_kind_is_compared_on_a_disk_and_on_a_mirror(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    saved(tmp_path / "root", url)
    names = listed(tmp_path / "root")
    assert {"model", "optimizer", "ema"} == {name.partition(".")[0] for name in names}
    for target in (Target(tmp_path / "root"), Target(mirrors=(url,))):
        save = checked(target)
        assert save.verdict.state == "whole"
        assert {one.kind for one in save.tensors or ()} == {"dcp", "model"}
        for one in save.tensors or ():
            assert (one.differ, one.not_compared) == ((), ())
            assert set(one.equal) == names


def test_the_second_save_of_a_step_is_compared_too(tmp_path: Path) -> None:
    url, state = f"file://{tmp_path}/mirror", make_state()
    with CheckpointManager(tmp_path / "root", [url], kinds=("dcp", "model")) as manager:
        manager.resume(state)
        for kinds in (("dcp",), ("dcp", "model")):
            manager.save(2, state, kinds=kinds).wait()
    for target in (Target(tmp_path / "root"), Target(mirrors=(url,))):
        states = [
            (one.verdict.state, [tuple(each.differ) for each in one.tensors or ()])
            for one in verify(target, tensors=True).saves
        ]
        assert states == [("whole", [()]), ("whole", [(), ()])]


def test_an_emergency_snapshot_is_compared_too(tmp_path: Path) -> None:
    state = make_state()
    with CheckpointManager(tmp_path) as manager:
        manager.resume(state)
        train(state, 2)
        manager.save_emergency_checkpoint(2, state)
    (one,) = checked(Target(tmp_path)).tensors or ()
    assert (one.kind, one.differ, one.not_compared) == ("emergency", (), ())
    assert set(one.equal) == listed(tmp_path)


def zeros_written(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Plant a writer that writes zeros for one tensor."""
    if kind == "dcp":
        layout = dcp._layout

        def changed(*arguments: Any) -> dict[str, Any]:
            state = layout(*arguments)
            return {**state, "model": {**state["model"], WRONG: torch.zeros_like(state["model"][WRONG])}}

        patch.setattr(dcp, "_layout", changed)
        return
    write = artifacts.write_pt

    def writes(tree: Any, path: Path, **more: Any) -> Any:
        return write({**tree, WRONG: torch.zeros_like(tree[WRONG])} if WRONG in tree else tree, path, **more)

    patch.setattr("ckptmirror.formats.model.write_pt", writes)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_tensor_that_was_written_wrong_is_named_though_every_checksum_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url, root, other = f"file://{tmp_path}/mirror", tmp_path / "root", {"dcp": "model", "model": "dcp"}[kind]
    with monkeypatch.context() as patch:
        zeros_written(patch, kind)
        saved(root, url)
    assert run("verify", root, "--deep").returncode == 0
    for place in (root, url):
        found = run("verify", place, "--tensors")
        assert_tells(found, 6, "1 damaged", "--deep", stdout=None)
        assert f"model.{WRONG} in kind {kind} is not what was saved; in kind {other} it is whole" in found.stdout
    ended = run("verify", "--root", root, "--mirror", url, "--tensors", "--deep", "--json")
    assert ended.returncode == 6
    said = json.loads(ended.stdout)
    assert said["pending_again"] == 0
    for save in said["saves"]:
        assert (save["state"], save["mend"], save["whole_kinds"]) == ("damaged", "", [other])
        assert {one["kind"]: one["differ"] for one in save["tensors"]} == {kind: [f"model.{WRONG}"], other: []}


def test_without_the_option_nothing_is_compared(tmp_path: Path) -> None:
    saved(tmp_path)
    assert json.loads(run("verify", tmp_path, "--json").stdout)["saves"][0]["tensors"] is None
    told = run("verify", tmp_path, "--tensors")
    assert f"whole, {len(listed(tmp_path))} tensors" in told.stdout


def test_a_bit_that_was_damaged_later_is_named_with_its_tensor(tmp_path: Path) -> None:
    saved(tmp_path, kinds=("model",))
    path = tmp_path / "model_000002.pt"
    values = torch.load(path, weights_only=True)[WRONG].numpy().tobytes()
    flip_bit(path, path.read_bytes().index(values) + 9)
    save = checked(Target(tmp_path))
    assert save.verdict.state == "damaged"
    assert save.faults == tuple(  # the two are one tensor
        f"model.{name} in kind model is not what was saved" for name in ("embed.weight", WRONG)
    )
    (deep,) = verify(Target(tmp_path), deep=True, tensors=True).saves
    assert "the crc32c of block 0" in deep.faults[0]
    assert deep.tensors == ()


def test_a_save_without_fingerprints_is_whole_and_says_that_none_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sidecars, "fingerprints_of", lambda _tensors: [])
        patch.setattr(live_sums, "fingerprints_of", lambda _tensors, **_: [])
        saved(tmp_path)
    save = checked(Target(tmp_path))
    assert save.verdict.state == "whole"
    assert all(one.equal == one.differ == () for one in save.tensors or ())
    assert "whole, 0 tensors" in run("verify", tmp_path, "--tensors").stdout


def test_files_that_are_no_tensors_are_damage_and_no_traceback(tmp_path: Path) -> None:
    root, _, _ = make_mirrored(tmp_path, 100, kinds=("dcp", "model"))
    ended = run("verify", root, "--tensors")
    assert ended.returncode == 6
    assert "Traceback" not in ended.stderr


# -- ranks -----------------------------------------------------------------------------------------------------------


def save_shards(_rank: int, root: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.rand(4, 7)).sum().backward()
    state.optimizer.step()
    with CheckpointManager(root) as manager:
        manager.resume(state)
        manager.save(2, state).wait()


def test_shards_are_compared_as_pieces_and_as_the_whole(tmp_path: Path) -> None:
    run_ranks(2, save_shards, tmp_path)
    for one in checked(Target(tmp_path)).tensors or ():
        assert (one.differ, one.not_compared) == ((), ())
        assert set(one.equal) == listed(tmp_path)


def save_experts(rank: int, root: Path) -> None:
    state = per_rank_job.new_state(rank)
    with CheckpointManager(root) as manager:
        manager.resume(state)
        per_rank_job.step(state, rank, 1)
        manager.save(1, state).wait()


def test_values_of_each_rank_are_compared(tmp_path: Path) -> None:
    run_ranks(2, save_experts, tmp_path)
    for one in checked(Target(tmp_path)).tensors or ():
        assert (one.differ, one.not_compared) == ((), ())
