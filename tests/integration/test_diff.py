"""``ckptmirror diff``: two saves, tensor by tensor."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from ckptmirror import CheckpointManager, TrainState
from tests.kit.cli import assert_tells, run
from tests.kit.training import saved_run


def test_two_saves_are_compared_tensor_by_tensor(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", f"file://{tmp_path}/mirror"
    saved_run(root, (1, 2), mirror)
    same = run("diff", root, mirror)
    assert (same.returncode, same.stdout) == (0, "")
    assert "tensors are equal, 0 are not, in step 2 in" in same.stderr
    other = run("diff", root / "dcp_000001", root / "model_000002.pt")
    assert other.returncode == 0, other.stderr
    lines = other.stdout.splitlines()
    assert "differs         model.0.weight" in lines
    assert "differs         ema.module.0.weight" in lines
    assert "differs         optimizer.state.0.weight.exp_avg" in lines
    assert run("diff", root / "dcp_000001", f"{mirror}/dcp_000001", "--exit-code").returncode == 0
    assert run("diff", root / "dcp_000001", f"{mirror}/dcp_000002", "--exit-code").returncode == 1


def test_tensors_of_another_shape_and_those_of_one_save_are_named(tmp_path: Path) -> None:
    def saved(name: str, model: torch.nn.Module) -> Path:
        with CheckpointManager(tmp_path / name) as manager:
            manager.resume(TrainState(model=model))
            manager.save(1, TrainState(model=model)).wait()
        return tmp_path / name

    torch.manual_seed(0)
    same = torch.nn.Linear(3, 4)
    first = saved("a", torch.nn.ModuleDict({"same": same, "wide": torch.nn.Linear(3, 2), "old": torch.nn.Linear(1, 1)}))
    second = saved(
        "b", torch.nn.ModuleDict({"same": same, "wide": torch.nn.Linear(4, 2), "new": torch.nn.Linear(1, 1)})
    )
    said = json.loads(run("diff", first, second, "--json").stdout)
    assert said["equal"] == ["model.same.bias", "model.same.weight"]
    assert said["differ"] == ["model.wide.bias"]
    assert said["reshaped"] == ["model.wide.weight"]
    assert said["only_first"] == ["model.old.bias", "model.old.weight"]
    assert said["only_second"] == ["model.new.bias", "model.new.weight"]
    assert (said["first"]["step"], said["second"]["place"]) == (1, str(second))


@pytest.mark.parametrize("lost", ["gone", "changed"])
def test_a_list_that_is_not_what_was_saved_is_no_list(tmp_path: Path, lost: str) -> None:
    saved_run(tmp_path / "root", (1,))
    (listed,) = (tmp_path / "root").glob("tensors_*")
    if lost == "gone":
        listed.unlink()
    else:
        listed.write_bytes(listed.read_bytes().replace(b"float32", b"float64"))
    refused = run("diff", tmp_path / "root" / "dcp_000001", tmp_path / "root")
    assert_tells(refused, 6, "tensors_000001_rank0.json")


def test_what_has_no_list_cannot_be_compared(tmp_path: Path) -> None:
    saved_run(tmp_path / "root", (1,))
    missing = run("diff", tmp_path / "root", tmp_path / "none")
    assert missing.returncode == 3, missing.stderr


def test_copies_without_lists_of_tensors_are_not_called_equal_and_what_they_lack_is_brought(tmp_path: Path) -> None:
    """Nothing was compared, and `--exit-code` ended with 0."""
    url = f"file://{tmp_path}/mirror"
    saved_run(tmp_path / "root", (1, 2), url, kinds=("dcp",))
    for step in ("1", "2"):
        assert run("stage", url, "--step", step, "--dest", tmp_path / step).returncode == 0
    refused = run("diff", tmp_path / "1", tmp_path / "2", "--exit-code")
    assert_tells(refused, 3, f"{tmp_path}/1 has no list of the tensors of step 1")
    checked = run("verify", tmp_path / "1", "--tensors")
    assert checked.returncode == 0
    assert "0 tensors" not in checked.stdout
    assert f"note: {tmp_path}/1 has no list of the tensors of step 1" in checked.stderr
    for step in ("1", "2"):
        hint = run("diff", tmp_path / step, url).stderr.split("`")[1]
        assert run(*shlex.split(hint)[1:]).returncode == 0
    assert run("diff", tmp_path / "1", tmp_path / "2", "--exit-code").returncode == 1
    assert run("diff", tmp_path / "2", url, "--exit-code").returncode == 0
