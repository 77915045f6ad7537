"""References of every form, and the lists of steps, on directories and mirrors that a factory filled."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, CheckpointNotFound, IntegrityError, KindMismatch, UsageError
from ckptmirror.flow.places.resolve import (
    CheckpointReference,
    find_local_checkpoint_steps,
    list_checkpoints,
    resolve_checkpoint_reference,
    resolve_resume_path,
)
from ckptmirror.local import directories
from ckptmirror.stores import open_store
from tests.kit.faults import flip_bit
from tests.kit.saves import FIRST_ATTEMPT, make_attempt, make_save, put_attempts, put_on_mirror


def test_dcp_directory_reference(tmp_path: Path) -> None:
    meta = make_save(tmp_path, 200)
    found = resolve_checkpoint_reference(tmp_path / "dcp_000200")
    assert found == CheckpointReference(tmp_path, 200, "dcp")
    assert (found.save_id, found.path) == (meta.save_id, tmp_path / "dcp_000200")


def test_resolve_checkpoint_reference_accepts_dcp_directory(tmp_path: Path) -> None:
    make_save(tmp_path, 200, ("dcp",))
    assert resolve_checkpoint_reference(f"{tmp_path}/dcp_000200/").kind == "dcp"


def test_eval_loader_preserves_explicit_dcp_intent_over_same_step_model_file(tmp_path: Path) -> None:
    make_save(tmp_path, 200, ("model",), number=1)
    make_save(tmp_path, 200, ("dcp",), number=2)
    model = resolve_checkpoint_reference(tmp_path / "model_000200.pt")
    (dcp_dir,) = tmp_path.glob("dcp_000200*")
    dcp = resolve_checkpoint_reference(dcp_dir)
    assert (model.kind, dcp.kind) == ("model", "dcp")
    assert dcp.path == dcp_dir


def test_a_meta_resolves_to_dcp_then_model_of_its_own_save(tmp_path: Path) -> None:
    make_save(tmp_path, 100, ("model",))
    make_save(tmp_path, 200, ("model", "dcp"), number=2)
    assert resolve_checkpoint_reference(tmp_path / "meta_000100.json").kind == "model"
    assert resolve_checkpoint_reference(tmp_path / "meta_000200.json").kind == "dcp"
    assert resolve_checkpoint_reference(tmp_path / "meta_000200.json", require_kind="model").kind == "model"


def test_a_required_kind_is_never_replaced_by_another(tmp_path: Path) -> None:
    make_save(tmp_path, 200, ("dcp",))
    for reference in ("dcp_000200", "meta_000200.json", "."):
        with pytest.raises(KindMismatch):
            resolve_checkpoint_reference(tmp_path / reference, require_kind="model")


def test_a_directory_resolves_to_its_newest_whole_save_by_number_not_by_text(tmp_path: Path) -> None:
    make_save(tmp_path, 999_999)
    make_save(tmp_path, 1_000_000, ("model",), number=2)
    assert resolve_checkpoint_reference(tmp_path) == CheckpointReference(tmp_path, 1_000_000, "model")


def test_a_rewound_run_resolves_to_what_the_rewind_led_to(tmp_path: Path) -> None:
    first = make_save(tmp_path, 100)
    make_save(tmp_path, 300, number=2)
    rewound = make_attempt(1, first)
    make_save(tmp_path, 150, attempt=rewound)
    put_attempts(tmp_path, [FIRST_ATTEMPT, rewound])
    assert resolve_checkpoint_reference(tmp_path).step == 150
    assert resolve_resume_path(tmp_path) == tmp_path / "dcp_000150"
    assert find_local_checkpoint_steps(tmp_path) == [100, 150]
    # Named by its path, a superseded save is still what was named.
    assert resolve_checkpoint_reference(tmp_path / "dcp_000300").step == 300


def test_without_a_list_of_attempts_a_rewound_branch_is_not_resumed_from(tmp_path: Path) -> None:
    first = make_save(tmp_path, 100)
    make_save(tmp_path, 300, number=2)
    make_save(tmp_path, 150, attempt=make_attempt(1, first))
    assert resolve_resume_path(tmp_path) == tmp_path / "dcp_000150"
    assert find_local_checkpoint_steps(tmp_path) == [100, 150]
    assert resolve_checkpoint_reference(tmp_path).step == 150


def test_a_broken_newer_save_is_not_passed_by_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_save(tmp_path, 200)
    make_save(tmp_path, 400, number=2)
    flip_bit(tmp_path / "meta_000400.json", 40)
    for find in (resolve_resume_path, resolve_checkpoint_reference):
        caplog.clear()
        found = find(tmp_path)
        assert "000200" in str(getattr(found, "path", found))
        assert f"skipped {tmp_path / 'meta_000400.json'}" in caplog.text


def test_a_broken_save_of_an_attempt_that_no_other_save_tells_of_is_not_passed_by_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_save(tmp_path, 300)
    make_save(tmp_path, 600, attempt=make_attempt(1, first))
    (tmp_path / "extra_000600_rank0.pt").write_bytes(b"cut short")
    assert resolve_checkpoint_reference(tmp_path).step == 300
    assert "skipped" in caplog.text


def test_a_directory_of_stages_gives_the_kind_that_stands_before_one_that_was_superseded(tmp_path: Path) -> None:
    first = make_save(tmp_path, 100)
    make_save(tmp_path, 600, ("dcp",), number=2)
    make_save(tmp_path, 600, ("model",), attempt=make_attempt(1, first))
    assert resolve_checkpoint_reference(tmp_path) == CheckpointReference(tmp_path, 600, "model")
    assert resolve_checkpoint_reference(tmp_path, require_kind="dcp").kind == "dcp"


def test_a_directory_with_saves_of_two_runs_has_no_newest(tmp_path: Path) -> None:
    make_save(tmp_path, 600)
    other = make_save(tmp_path, 900, run_id="ab" * 16)
    for find in (resolve_checkpoint_reference, resolve_resume_path, find_local_checkpoint_steps):
        with pytest.raises(UsageError, match="saves of 2 runs"):
            find(tmp_path)
    assert resolve_checkpoint_reference(tmp_path / "dcp_000900").save_id == other.save_id
    assert [line.standing for line in list_checkpoints(tmp_path)] == ["current", "current"]


def test_a_save_of_an_attempt_that_the_list_does_not_tell_of_is_not_passed_by_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_save(tmp_path, 300)
    make_save(tmp_path, 600, attempt=make_attempt(1, first))
    put_attempts(tmp_path, [FIRST_ATTEMPT])
    assert resolve_checkpoint_reference(tmp_path).step == 300
    assert "skipped step 600" in caplog.text


def test_latest_that_names_an_older_save_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_save(tmp_path, 100)
    make_save(tmp_path, 200, number=2)
    directories.replace_link(tmp_path / "latest", "dcp_000200")
    assert resolve_checkpoint_reference(tmp_path / "latest").step == 200
    assert caplog.text == ""
    directories.replace_link(tmp_path / "latest", "dcp_000100")
    assert resolve_checkpoint_reference(tmp_path / "latest").step == 100
    assert "a reader would take step 200" in caplog.text


def test_a_later_save_of_the_step_in_another_kind_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = make_save(tmp_path, 100, ("dcp", "model"))
    assert resolve_checkpoint_reference(tmp_path).save_id == first.save_id
    assert caplog.text == ""
    later = make_save(tmp_path, 100, ("model",), number=2)
    assert resolve_checkpoint_reference(tmp_path).save_id == first.save_id
    assert f"a later save, {later.save_id[:8]}, has it in kind model" in caplog.text
    caplog.clear()
    assert resolve_checkpoint_reference(tmp_path, require_kind="model").save_id == later.save_id
    assert caplog.text == ""


def test_latest_is_followed_to_a_validated_target(tmp_path: Path) -> None:
    make_save(tmp_path, 100)
    make_save(tmp_path, 200, number=2)
    directories.replace_link(tmp_path / "latest", "dcp_000100")
    assert resolve_checkpoint_reference(tmp_path / "latest") == CheckpointReference(tmp_path, 100, "dcp")


@pytest.mark.parametrize("target", ["dcp_000300", "../elsewhere/dcp_000100", "meta_000100.json", "/tmp"])
def test_latest_that_points_at_no_whole_save_is_refused(tmp_path: Path, target: str) -> None:
    make_save(tmp_path, 100)
    (tmp_path / "latest").symlink_to(target)
    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(tmp_path / "latest")


def test_a_link_to_a_checkpoint_resolves_to_the_checkpoint(tmp_path: Path) -> None:
    make_save(tmp_path / "run", 100)
    (tmp_path / "best").symlink_to(tmp_path / "run" / "dcp_000100")
    assert resolve_checkpoint_reference(tmp_path / "best") == CheckpointReference(tmp_path / "run", 100, "dcp")


def test_what_no_valid_meta_names_is_refused(tmp_path: Path) -> None:
    make_save(tmp_path, 200, write_meta=False)
    for name in ("dcp_000200", "model_000200.pt"):
        with pytest.raises(CheckpointNotFound, match="no meta file names it"):
            resolve_checkpoint_reference(tmp_path / name)
    assert find_local_checkpoint_steps(tmp_path) == []
    assert resolve_resume_path(tmp_path) is None


def test_an_error_names_the_place_to_list(tmp_path: Path) -> None:
    make_save(tmp_path, 200, kinds=("model",))
    with pytest.raises(KindMismatch) as raised:
        resolve_checkpoint_reference(tmp_path / "model_000200.pt", require_kind="dcp")
    assert f"`ckptmirror ls {tmp_path}`" in raised.value.hint


def test_a_reference_that_is_no_path_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="77 is not a path or a URL"):
        resolve_checkpoint_reference(77)  # type: ignore[arg-type]


def test_a_directory_that_does_not_exist_has_no_steps_but_cannot_be_listed(tmp_path: Path) -> None:
    assert find_local_checkpoint_steps(tmp_path / "later") == []
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        list_checkpoints(tmp_path / "later")


def test_load_corrupt_meta_file_raises(tmp_path: Path) -> None:
    make_save(tmp_path, 200)
    flip_bit(tmp_path / "meta_000200.json", 40)
    for name in ("dcp_000200", "model_000200.pt", "meta_000200.json"):
        with pytest.raises(BrokenMeta):
            resolve_checkpoint_reference(tmp_path / name)


def test_a_truncated_artifact_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_save(tmp_path, 200)
    (tmp_path / "dcp_000200" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(IntegrityError, match="5 bytes"):
        resolve_checkpoint_reference(tmp_path / "dcp_000200")


def test_a_dcp_step_needs_its_metadata_a_meta_and_every_artifact(tmp_path: Path) -> None:
    make_save(tmp_path, 100)
    make_save(tmp_path, 200, number=2)
    make_save(tmp_path, 300, number=3)
    make_save(tmp_path, 400, ("model",), number=4)
    (tmp_path / "dcp_000200" / ".metadata").unlink()
    (tmp_path / "meta_000300.json").unlink()
    assert find_local_checkpoint_steps(tmp_path, "dcp") == [100]
    assert find_local_checkpoint_steps(tmp_path, "model") == [100, 200, 400]
    assert find_local_checkpoint_steps(tmp_path) == [100, 200, 400]


def test_step_parse_is_exact(tmp_path: Path) -> None:
    make_save(tmp_path, 200)
    for name in ("xdcp_000200", "dcp_000200.bak", "dcp_200", "dcp_0000200"):
        (tmp_path / name).mkdir()
    assert find_local_checkpoint_steps(tmp_path) == [200]
    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(tmp_path / "dcp_200")


def test_a_missing_path_and_a_foreign_file_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(tmp_path / "dcp_000200")
    with pytest.raises(UsageError):
        resolve_checkpoint_reference(tmp_path / "notes.txt")


def test_an_emergency_directory_resolves_when_the_metas_of_all_ranks_are_there(tmp_path: Path) -> None:
    meta = make_save(tmp_path, 250, ("emergency",), write_meta=False)
    (directory,) = tmp_path.glob("emergency_step_*")
    from ckptmirror.core.codec import meta_to_bytes

    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(directory)
    (directory / names.emergency_meta_name(0)).write_bytes(meta_to_bytes(meta))
    assert resolve_checkpoint_reference(directory) == CheckpointReference(tmp_path, 250, "emergency")
    assert resolve_resume_path(tmp_path) == directory
    with pytest.raises(KindMismatch):
        resolve_checkpoint_reference(tmp_path)  # without a kind, only dcp and model are read


def test_the_older_layout_is_recognised_by_its_markers(tmp_path: Path) -> None:
    directory = tmp_path / "dist_ckpt_000200"
    directory.mkdir()
    (directory / ".metadata").write_bytes(b"x")
    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(directory)
    (tmp_path / "meta.json").write_text("{}")
    assert resolve_checkpoint_reference(directory) == CheckpointReference(tmp_path, 200, "dcp")


def test_a_staged_directory_without_a_list_of_attempts_serves_every_step_in_it(tmp_path: Path) -> None:
    lost = make_save(tmp_path / "elsewhere", 50)
    middle = make_attempt(1, lost)
    gone = make_save(tmp_path / "elsewhere", 120, attempt=middle)
    make_save(tmp_path / "eval", 100, number=7)  # of the first attempt; the middle one is not here
    make_save(tmp_path / "eval", 200, attempt=make_attempt(2, gone))
    assert find_local_checkpoint_steps(tmp_path / "eval") == [100, 200]
    assert resolve_checkpoint_reference(tmp_path / "eval").step == 200


def test_a_mirror_url_resolves_to_its_newest_step_and_to_what_it_names(tmp_path: Path) -> None:
    url = f"memory://m-{uuid.uuid4().hex}/run"
    store = open_store(url)
    put_attempts(store, [FIRST_ATTEMPT])
    for number, kinds in enumerate((("dcp", "model"), ("model",)), start=1):
        put_on_mirror(store, tmp_path, make_save(tmp_path, 100 * number, kinds, number=number))
    assert resolve_checkpoint_reference(url) == CheckpointReference(store.url, 200, "model")
    assert resolve_checkpoint_reference(url, require_kind="dcp") == CheckpointReference(store.url, 100, "dcp")
    assert resolve_checkpoint_reference(f"{url}/model_000100.pt") == CheckpointReference(store.url, 100, "model")
    assert resolve_checkpoint_reference(f"{url}/meta_000100.json") == CheckpointReference(store.url, 100, "dcp")
    with pytest.raises(CheckpointNotFound):
        resolve_checkpoint_reference(f"{url}/dcp_000200")


def test_a_listing_says_the_standing_of_each_save_and_why_one_is_incomplete(tmp_path: Path) -> None:
    first = make_save(tmp_path, 100)
    make_save(tmp_path, 100, ("dcp",), number=2)
    make_save(tmp_path, 200, number=3)
    rewound = make_attempt(1, make_save(tmp_path, 150, number=4))
    make_save(tmp_path, 160, attempt=rewound)
    make_save(tmp_path, 170, attempt=rewound, number=2)
    make_save(tmp_path, 300, number=9)
    (tmp_path / "model_000170.pt").unlink()
    flip_bit(tmp_path / "meta_000160.json", 40)
    put_attempts(tmp_path, [FIRST_ATTEMPT, rewound])
    listed = list_checkpoints(tmp_path)
    assert [(one.step, one.standing) for one in listed] == [
        (100, "current"),
        (100, "current"),
        (150, "current"),
        (160, "incomplete"),
        (170, "current"),
        (170, "incomplete"),
        (200, "current"),
        (300, "superseded"),
    ]
    assert listed[0].save_id == first.save_id
    assert [one.current_kinds for one in listed[:2]] == [("model",), ("dcp",)]
    assert "model_000170.pt is missing" in listed[5].why
    assert (listed[4].kinds, listed[5].kinds) == (("dcp",), ("model",))
