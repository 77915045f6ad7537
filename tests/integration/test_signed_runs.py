"""A run with keys: what is signed is believed, and nothing else is, wherever it comes from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ckptmirror import CheckpointManager, Retention, load_checkpoint, stage_checkpoint_step, use_keys
from ckptmirror.core import signing
from ckptmirror.core.codec import (
    attempts_from_bytes,
    attempts_to_bytes,
    meta_from_bytes,
    meta_to_bytes,
    tombstone_to_bytes,
)
from ckptmirror.core.errors import (
    AttemptFenced,
    BrokenMeta,
    CheckpointNotFound,
    ConfigError,
    DeadlinePassed,
    IntegrityError,
    NewerFormat,
    NotSigned,
    RefusedOnlyCopy,
    WaitTimeout,
)
from ckptmirror.core.events import EventBus
from ckptmirror.core.meta_merging import merge_parts
from ckptmirror.core.model import Attempt, Tombstone, new_id
from ckptmirror.core.names import CONTROL_DIR, part_name, tagged
from ckptmirror.core.sealed_json import seal
from ckptmirror.flow.save.emergency import save_emergency
from ckptmirror.local.checksums import crc32c
from ckptmirror.local.inventory import read_inventory
from tests.kit.cli import assert_tells, clean_environment, run
from tests.kit.legacy import save_legacy
from tests.kit.roots import MirroredRoot, whole
from tests.kit.saves import make_save, put_on_mirror
from tests.kit.training import everything, new_state, running, same, saved_run, train

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _no_keys_before_or_after() -> Iterator[None]:
    before = signing.set_current(signing.Keys())
    yield
    signing.set_current(before)


def make_key(folder: Path, name: str = "run") -> dict[str, Any]:
    """Write a pair of keys; return the settings of a process that has both."""
    folder.mkdir(exist_ok=True)
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    public.chmod(0o644)
    return {"signing_key": private, "verify_keys": [public]}


def environment(signing_key: Path, verify_keys: Sequence[Path] = ()) -> dict[str, str]:
    """Return the variables that give a verb these keys."""
    return {
        "CKPTMIRROR_SIGNING_KEY": str(signing_key),
        "CKPTMIRROR_VERIFY_KEYS": os.pathsep.join(map(str, verify_keys)),
    }


def as_process(**keys: Any) -> None:
    """Go on as another process would, with these keys alone."""
    signing.set_current(signing.Keys())
    use_keys(**keys)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return make_key(tmp_path / "keys")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, str, Path]:
    """The root, the mirror's URL, and its directory."""
    there = tmp_path / "mirror"
    there.mkdir()
    return tmp_path / "root", there.as_uri(), there


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a document as somebody without the key would: with a right checksum, and the signature that was there."""
    document = json.loads(path.read_bytes())
    change(document)
    document.pop("checksum")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    os.unlink(path)
    path.write_bytes((json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode())


def as_copy(path: Path, url: str, *, partial: bool, lacks: tuple[str, ...] = ("optim", "extra")) -> None:
    """Replace a signed meta by that of a copy without some files, as somebody without the key can: it proves itself."""
    proof = path.read_text()

    def change(document: dict[str, Any]) -> None:
        del document["signature"]
        document["artifacts"] = [one for one in document["artifacts"] if not one["path"].startswith(lacks)]
        for one in document["artifacts"]:
            one["object"] = None
        document.update(staged_from=url, partial=partial, proof=proof)

    forged(path, change)


def with_same_crc32c(data: bytes, at: int) -> bytes:
    """Flip the bits of a byte, and choose the four bytes after it so that the crc32c stays: it is linear over GF(2)."""
    changed = bytearray(data)
    changed[at] ^= 0xFF
    here = slice(at + 1, at + 5)

    def crc(value: int) -> int:
        changed[here] = value.to_bytes(4, "little")
        return crc32c(bytes(changed))

    base = crc(0)
    rows = {bit: (crc(1 << bit) ^ base, 1 << bit) for bit in range(32)}
    wanted, value = crc32c(data) ^ base, 0
    basis: dict[int, tuple[int, int]] = {}
    for column, source in rows.values():
        while column and column.bit_length() in basis:
            other, origin = basis[column.bit_length()]
            column, source = column ^ other, source ^ origin
        if column:
            basis[column.bit_length()] = (column, source)
    while wanted:
        column, source = basis[wanted.bit_length()]
        wanted, value = wanted ^ column, value ^ source
    assert crc(value) == crc32c(data)
    return bytes(changed)


# -- a run from its first save to another machine ---------------------------------------------------------------------


def test_a_signed_run_is_saved_resumed_and_staged_by_somebody_without_its_private_key(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, there = places
    states = saved_run(root, (1, 2), url, **keys)
    for path in (root / "meta_000002.json", there / "meta_000002.json", there / "writer.json"):
        assert "signature" in json.loads(path.read_bytes())
    for artifact in whole(root)[2].artifacts:
        assert len(artifact.digest.hashes) == len(artifact.digest.blocks)
    with running(tmp_path / "elsewhere", url, **keys) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert start.step == 2
        assert same(everything(state), states[2])
    as_process(verify_keys=keys["verify_keys"])
    dest = tmp_path / "dest"
    for kind in ("model", "dcp"):  # the second widens what the first left
        stage_checkpoint_step(url, step=2, dest=dest, require_kind=kind)  # type: ignore[arg-type]
        assert load_checkpoint(dest).meta.step == 2
    assert meta_from_bytes((dest / "meta_000002.json").read_bytes()).kinds == ("dcp", "model")
    signing.set_current(signing.Keys())
    assert load_checkpoint(dest).meta.step == 2  # who asks for no signature is not disturbed by one


def test_the_settings_and_the_verbs_demand_it_too(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, _ = places
    saved_run(root, (1,), url, **keys)
    other = make_key(tmp_path / "other")
    right, wrong = ({"CKPTMIRROR_VERIFY_KEYS": str(one["verify_keys"][0])} for one in (keys, other))
    assert "whole" in run("verify", url, env=right).stdout
    assert run("stage", url, "--step", "1", "--dest", tmp_path / "a", env=right).returncode == 0
    ended = run("verify", url, env=wrong)
    assert ended.returncode == 6
    assert "not by a key in verify_keys" in ended.stdout + ended.stderr
    assert run("stage", url, "--step", "1", "--dest", tmp_path / "b", env=wrong).returncode == 6
    assert_tells(run("drain", root, env=right), 10, "signing_key is not")
    assert_tells(run("ls", url, env={"CKPTMIRROR_VERIFY_KEYS": "/nowhere.pub"}), 10, "there is no /nowhere.pub")


def test_a_run_that_was_not_signed_is_signed_first_and_then_demanded(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, _ = places
    saved_run(root, (1,), url)
    as_process()
    with pytest.raises(Exception, match="not signed"), running(root, url, **keys) as manager:
        manager.resume(new_state())
    as_process()
    saved_run(root, (2,), url, signing_key=keys["signing_key"])
    as_process()
    with running(root, url, **keys) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_verify_calls_what_was_never_signed_not_believed_and_has_none_of_it_deleted_or_sent_again(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    saved_run(root, (1,), url)
    as_process()
    saved_run(root, (2,), url, signing_key=keys["signing_key"])
    shutil.copytree(there, there.with_name("moved"))  # to another disk: each object is another file now
    shutil.rmtree(there)
    there.with_name("moved").rename(there)
    before = objects_of(there)
    env = environment(**keys)
    assert run("verify", root, env=env).stdout.count("NOT BELIEVED: It is not signed.\n") == 1  # and no command
    ended = run("verify", "--root", root, "--mirror", url, "--deep", env=env)
    assert ended.returncode == 6
    assert ended.stdout.count("NOT BELIEVED: It is not signed.") == 2
    assert "DAMAGED" not in ended.stdout
    assert " -> " not in ended.stdout  # no command
    assert "2 of 4 saves are whole; 2 not believed" in ended.stderr
    assert "docs/security.md says" in ended.stderr
    assert objects_of(there) == before


def test_verify_has_no_save_deleted_that_was_never_signed_though_a_signed_one_of_its_step_is_beside_it(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    saved_run(root, (1, 2), url)
    as_process()
    with running(root, url, signing_key=keys["signing_key"]) as manager:
        state = new_state()
        manager.resume(state, policy=1, force=True)
        train(state, 1)
        manager.save(2, state).wait("mirrored", timeout_s=60)
    assert len(list(there.glob("meta_000002*.json"))) == 2
    env = environment(**keys)
    for more in ([url], [root], ["--root", root, "--mirror", url]):
        said = run("verify", *more, env=env).stdout
        assert "NOT BELIEVED: It is not signed." in said
        assert " -> " not in said


def test_verify_names_what_repairs_a_local_meta_that_is_not_signed_if_the_mirror_has_the_signed_save(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, _ = places
    saved_run(root, (1,), url, **keys)
    forged(root / "meta_000001.json", lambda document: document.pop("signature"))
    env = environment(**keys)
    said = run("verify", "--root", root, "--mirror", url, env=env).stdout
    command = said.partition("NOT BELIEVED: It is not signed. -> ")[2].partition("\n")[0]
    assert "meta_000001.json.broken && ckptmirror stage --step 1" in command
    command = command.replace("ckptmirror stage", f"{sys.executable} -m ckptmirror stage")
    assert subprocess.run(command, shell=True, env=clean_environment() | env, check=False).returncode == 0
    assert run("verify", "--root", root, "--mirror", url, env=env).returncode == 0


def test_what_replaced_a_signed_meta_on_the_mirror_is_sent_again(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    saved_run(root, (1,), url, **keys)
    forged(there / "meta_000001.json", lambda document: document.update(world_size=2))  # of the same size
    ended = run("verify", "--root", root, "--mirror", url, "--deep", env=environment(**keys))
    assert "NOT BELIEVED: " in ended.stdout
    assert "1 file on the mirror will be sent again" in ended.stderr


def test_a_save_that_was_not_sent_before_signatures_were_demanded_names_the_drain_that_sends_it(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    with_a_save_that_was_not_sent(root, url, {})
    as_process()
    with running(root, url, uploads=False, signing_key=keys["signing_key"]) as manager:
        state = new_state()
        manager.resume(state)
        train(state, 1)
        manager.save(3, state).wait("committed")
    ended = run("drain", root, env=environment(**keys))
    assert ended.returncode == 8
    way_out = f"`ckptmirror drain --root {root}` with signing_key and no verify_keys sends it"
    assert way_out in ended.stdout + ended.stderr
    assert not (there / "meta_000002.json").exists()
    assert (there / "meta_000003.json").exists()
    assert run("drain", root, env=environment(signing_key=keys["signing_key"])).returncode == 0
    assert (there / "meta_000002.json").exists()
    assert run("drain", root, env=environment(**keys)).returncode == 0


def test_keys_are_changed_by_believing_both_for_a_while(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, _ = places
    saved_run(root, (1,), url, **keys)
    new = make_key(tmp_path / "new")
    as_process()
    saved_run(root, (2,), url, signing_key=new["signing_key"], verify_keys=[*keys["verify_keys"], *new["verify_keys"]])
    as_process()
    with running(root, url, **new) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


# -- who has no key ---------------------------------------------------------------------------------------------------


def objects_of(mirror: Path) -> dict[str, bytes]:
    return {str(path.relative_to(mirror)): path.read_bytes() for path in mirror.rglob("*") if path.is_file()}


def with_a_save_that_was_not_sent(root: Path, url: str, keys: dict[str, Any]) -> None:
    """Save steps 1 and 2 of a signed run, of which only step 1 is on the mirror."""
    saved_run(root, (1,), url, **keys)
    with suppress(DeadlinePassed), running(root, url, **keys) as manager:
        state = new_state()
        manager.resume(state)
        assert manager._node is not None
        assert manager._node._workers.stop(60)
        train(state, 1)
        manager.save(2, state).wait("committed")
        manager.close(timeout_s=0.0)


def test_a_verb_without_a_key_changes_nothing_of_a_signed_run_and_says_what_to_set(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, there = places
    with_a_save_that_was_not_sent(root, url, keys)
    before = objects_of(there)
    for verb, *more in (
        ["drain"],
        ["push", "--mirror", url],
        ["push", "--mirror", f"file://{tmp_path}/new"],
        ["rewind", "--step", "1"],
        ["forget-mirror", "--url", url],
    ):
        ended = run(verb, "--root", root, *more)
        assert_tells(ended, 10, f"The run of {root} is signed", "Set signing_key and verify_keys", stdout=None)
    assert objects_of(there) == before
    assert not (tmp_path / "new").exists()
    private, public = str(keys["signing_key"]), str(keys["verify_keys"][0])
    right = {"CKPTMIRROR_SIGNING_KEY": private, "CKPTMIRROR_VERIFY_KEYS": public}
    assert run("drain", "--root", root, env=right).returncode == 0
    assert "signature" in json.loads((there / "meta_000002.json").read_bytes())


def test_a_signed_save_is_sent_by_nobody_who_cannot_sign_it_though_the_list_of_attempts_is_gone(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    with_a_save_that_was_not_sent(root, url, keys)
    (root / CONTROL_DIR / "attempts.json").unlink()
    before = objects_of(there)
    ended = run("drain", "--root", root)
    assert ended.returncode == 8
    assert "meta_000002.json is signed, and this process has no signing_key" in ended.stderr
    assert objects_of(there) == before


# -- what somebody else wrote -----------------------------------------------------------------------------------------


def other_attempt() -> Attempt:
    return Attempt(new_id(), 999, None, by_person=True, root=new_id())


def test_a_forged_attempt_fences_no_trainer_and_the_next_start_goes_on(
    places: tuple[Path, str, Path], keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    root, url, there = places

    def forge() -> None:
        known = attempts_from_bytes((there / "writer.json").read_bytes())
        signing.set_current(signing.Keys())
        data = attempts_to_bytes(replace(known, attempts=(*known.attempts, other_attempt())))
        os.unlink(there / "writer.json")
        (there / "writer.json").write_bytes(data)

    with running(root, url, **keys) as manager:
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save(1, state).wait("mirrored", timeout_s=60.0)
        mine = signing.current()
        forge()
        signing.set_current(mine)
        for step in (2, 3):
            train(state)
            with suppress(
                WaitTimeout, DeadlinePassed
            ):  # the mirror is out of order: nothing is sent, nothing is fenced
                manager.save(step, state).wait("mirrored", timeout_s=2.0)
    with running(root, url, **keys) as manager, caplog.at_level(logging.ERROR):
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 3
        manager.close(timeout_s=60.0)
    assert "not signed" in caplog.text
    assert "signature" in json.loads((there / "writer.json").read_bytes())


def test_without_keys_the_same_entry_fences(places: tuple[Path, str, Path]) -> None:
    root, url, there = places
    with running(root, url) as manager:
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save(1, state).wait("mirrored", timeout_s=60.0)
        known = attempts_from_bytes((there / "writer.json").read_bytes())
        os.unlink(there / "writer.json")
        (there / "writer.json").write_bytes(
            attempts_to_bytes(replace(known, attempts=(*known.attempts, other_attempt())))
        )
        train(state)
        handle = manager.save(2, state)
        with pytest.raises(AttemptFenced, match="Attempt 999"):  # at once, whatever the limit
            handle.wait("mirrored", timeout_s=3600.0)
        with pytest.raises(AttemptFenced):
            manager.wait(timeout_s=3600.0)
        assert not handle.done("mirrored")


def test_a_forged_tombstone_lets_no_local_save_go(places: tuple[Path, str, Path], keys: dict[str, Any]) -> None:
    root, url, there = places
    retention = Retention(keep_last=None)
    saved_run(root, (1, 2), url, retention=retention, **keys)
    meta = whole(root)[1]
    mine = signing.set_current(signing.Keys())
    data = tombstone_to_bytes(Tombstone(meta.save_id, 1, meta.kinds, "old", "2026-01-01T00:00:00Z"))
    signing.set_current(mine)
    os.unlink(there / "meta_000001.json")
    (there / "meta_000001.json").write_bytes(data)
    for artifact in meta.artifacts:
        os.unlink(there / artifact.path)
    with running(root, url, retention=Retention(keep_last=1), **keys) as manager:
        manager.resume(new_state())
        report = manager.rotate(timeout_s=0.0)
        assert report.deleted == ()
    assert 1 in whole(root)


def test_bytes_with_the_same_crc32c_are_found_wherever_they_are_read(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    """The checksum of the stores and of the format finds damage; whoever wants to keep it, keeps it."""
    root, url, there = places
    saved_run(root, (1,), url, **keys)
    (path,) = [artifact.path for artifact in whole(root)[1].artifacts if artifact.path.startswith("model_")]
    bad = with_same_crc32c((root / path).read_bytes(), 700)
    for place in (root, there):
        os.unlink(place / path)
        (place / path).write_bytes(bad)
    as_process(verify_keys=keys["verify_keys"])
    for where in (str(root), url):
        ended = run("verify", "--deep", where, env={"CKPTMIRROR_VERIFY_KEYS": str(keys["verify_keys"][0])})
        assert ended.returncode == 6
        assert "SHA-256 of block 0" in ended.stdout
        assert run("verify", "--deep", where).returncode == 6  # it is there, so it is compared
    with pytest.raises(IntegrityError, match="SHA-256"):
        load_checkpoint(root / path)
    with pytest.raises(IntegrityError, match="SHA-256"):
        stage_checkpoint_step(url, step=1, dest=tmp_path / "dest", require_kind="model")


@pytest.mark.parametrize(
    "what",
    ["kinds", "digest", "step_of_parent", "metrics", "without_proof", "proof_of_proof", "proof_that_is_no_text"],
)
def test_a_staged_copy_is_believed_only_as_a_part_of_what_was_signed(
    what: str, places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, _ = places
    saved_run(root, (1, 2), url, **keys)
    as_process(verify_keys=keys["verify_keys"])
    dest = tmp_path / "dest"
    stage_checkpoint_step(url, step=2, dest=dest, require_kind="model")
    path = dest / "meta_000002.json"
    assert meta_from_bytes(path.read_bytes()).step == 2

    def change(document: dict[str, Any]) -> None:
        if what == "kinds":
            document["artifacts"][0]["kinds"] = ["dcp", "model"]
            document["kinds"] = ["dcp", "model"]
            document["artifacts"][0]["path"] = "optim_000002_rank0.pt"
        elif what == "digest":
            other = next(a for a in whole(root)[1].artifacts if a.path.startswith("model_"))
            made = json.loads(meta_to_bytes_unsigned(replace(whole(root)[1], artifacts=(other,), kinds=("model",))))
            for key in ("blocks", "crc32c", "sha256", "size_bytes"):
                document["artifacts"][0][key] = made["artifacts"][0][key]
        elif what == "step_of_parent":
            document["attempt"]["number"] += 1
        elif what == "metrics":
            document["metrics"] = {"loss": 0.0}
        elif what == "without_proof":
            del document["proof"]
        elif what == "proof_of_proof":
            document["proof"] = path.read_text()
        else:
            document["proof"] += "\ud800"  # no bytes are this text

    forged(path, change)
    with pytest.raises(BrokenMeta if what == "proof_that_is_no_text" else NotSigned):
        meta_from_bytes(path.read_bytes())
    with pytest.raises((IntegrityError, CheckpointNotFound)):
        load_checkpoint(dest)


def meta_to_bytes_unsigned(meta: Any) -> bytes:
    before = signing.set_current(signing.Keys())
    try:
        return meta_to_bytes(meta)
    finally:
        signing.set_current(before)


@pytest.mark.parametrize("partial", [True, False])
def test_a_mirror_cannot_leave_files_out_of_a_save_by_calling_it_a_copy(
    partial: bool, places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    """It began without random state, schedule and data position, and its table took the mirror's word for a save."""
    root, url, there = places
    states = saved_run(root, (1, 2), url, **keys)
    as_copy(there / "meta_000002.json", url, partial=partial)
    with running(tmp_path / "elsewhere", url, **keys) as manager:
        state = new_state(seed=5)
        start = manager.resume(state)
        assert start is not None
        assert (start.step, start.missing) == (1, ())
        assert same(everything(state), states[1])
        why = "meta of a copy" if partial else "lacks files of the signed meta"
        assert any(why in one for one in start.passed_over)


def test_a_copy_that_lacks_files_and_does_not_say_so_is_neither_resumed_nor_signed(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    saved_run(root, (1, 2), **keys)
    as_copy(root / "meta_000002.json", url, partial=False)
    with running(root, url, **keys) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert (start.step, start.missing) == (1, ())
        with suppress(WaitTimeout):
            manager.wait(timeout_s=30.0)
    assert (there / "meta_000001.json").exists()
    assert not (there / "meta_000002.json").exists()


def test_a_part_of_a_node_that_is_a_copy_is_not_merged(places: tuple[Path, str, Path], keys: dict[str, Any]) -> None:
    """The merged meta would be signed without the files that it lacks."""
    root, url, _ = places
    saved_run(root, (1,), **keys)
    parts = [replace(whole(root)[1], nodes=2, node=node, world_size=2) for node in (0, 1)]
    paths = [root / f"part{node}.json" for node in (0, 1)]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(meta_to_bytes(part))
    assert merge_parts([meta_from_bytes(path.read_bytes()) for path in paths]).is_whole
    as_copy(paths[1], url, partial=True)
    with pytest.raises(BrokenMeta, match="copy"):
        merge_parts([meta_from_bytes(path.read_bytes()) for path in paths])


@pytest.mark.parametrize(
    ("signed", "said"),
    [
        ("so", ""),
        ("", "It is not signed, and this process would sign the whole save."),
        ("by another", "If both are yours, set verify_keys (CKPTMIRROR_VERIFY_KEYS) to the public keys of both."),
    ],
)
def test_who_signs_without_demanding_signatures_signs_nobody_elses_part(
    signed: str, said: str, places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    """Else what somebody planted on the mirror would be signed with the whole save."""
    root, url, there = places
    as_process(signing_key=keys["signing_key"])
    place = MirroredRoot(root, [url])
    whole_meta = make_save(root, 100, ("model",), ranks=2, write_meta=False)
    mine, theirs = (
        replace(whole_meta, nodes=2, node=node, artifacts=tuple(a for a in whole_meta.artifacts if a.rank == node))
        for node in (0, 1)
    )
    (root / "meta_000100.json").write_bytes(meta_to_bytes(mine))
    put_on_mirror(place.store, root, theirs, commit=False)
    part = meta_to_bytes(theirs)
    if signed != "so":
        as_process(**({"signing_key": make_key(tmp_path / "other")["signing_key"]} if signed else {}))
        part = meta_to_bytes(replace(theirs, metrics={"loss": 0.0}))
        as_process(signing_key=keys["signing_key"])
    place.store.write(part_name(100, mine.save_id, 2, 2), part, if_generation=0)
    place.add(mine)
    place.table.release_save(mine.save_id)
    place.upload()
    assert (there / "meta_000100.json").exists() is not bool(said)
    (meta,) = [record for record in place.records() if record.role == "meta"]
    assert said in (meta.reason or "")
    place.close()
    if signed == "so":
        believed = make_key(tmp_path / "later")["verify_keys"][0]
        for verb in ("ls", "verify"):
            ended = run(verb, url, env={"CKPTMIRROR_VERIFY_KEYS": str(believed)})
            assert "It is signed, but not by a key in verify_keys" in ended.stdout + ended.stderr
            assert "waits for" not in ended.stdout + ended.stderr, "the parts are those of a save that is committed"


def test_who_signs_without_demanding_signatures_signs_no_meta_that_somebody_planted(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    """Not either where it only gives an object of its own another name there."""
    root, url, there = places
    as_process(signing_key=keys["signing_key"])
    place = MirroredRoot(root, [url])
    meta = make_save(root, 100, ("model",), write_meta=False)
    (root / "meta_000100.json").write_bytes(meta_to_bytes(meta))
    as_process()
    wrong = replace(meta.artifacts[0], object=tagged(meta.artifacts[0].path, meta.save_id))
    planted = meta_to_bytes(replace(meta, metrics={"loss": 0.0}, artifacts=(wrong, *meta.artifacts[1:])))
    place.store.write("meta_000100.json", planted, if_generation=0)
    as_process(signing_key=keys["signing_key"])
    place.add(meta)
    place.table.release_save(meta.save_id)
    place.upload()
    assert (there / "meta_000100.json").read_bytes() == planted
    (record,) = [record for record in place.records() if record.role == "meta"]
    assert "meta_000100.json" in (record.reason or "")
    assert "is not believed: It is not signed" in (record.reason or "")
    place.close()


def test_who_has_the_key_of_another_run_is_told_so_and_not_to_move_anything_away(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, _ = places
    saved_run(root, (1,), url, **keys)
    other = make_key(tmp_path / "other")
    as_process()
    with pytest.raises(NotSigned, match=r"attempts\.json is not believed: It is signed, but not by a key") as refused:
        saved_run(root, (2,), url, **other)
    assert "add the key that signed it to verify_keys" in refused.value.hint
    listed = run("ls", url, env={"CKPTMIRROR_VERIFY_KEYS": str(other["verify_keys"][0])})
    assert "writer.json is not believed: It is signed, but not by a key in verify_keys" in listed.stderr
    assert "The next start of the trainer rebuilds it" not in listed.stderr
    as_process()
    with (
        pytest.raises(NotSigned, match=r"writer\.json is not believed"),
        running(tmp_path / "new", url, **other) as new,
    ):
        new.resume(new_state())
    given = {
        "CKPTMIRROR_SIGNING_KEY": str(other["signing_key"]),
        "CKPTMIRROR_VERIFY_KEYS": str(other["verify_keys"][0]),
    }
    refused_too = run("rewind", "--root", root, "--step", "1", env=given)
    assert_tells(refused_too, 6, "is not believed", "add the key that signed it to verify_keys")


def test_who_takes_the_old_key_out_too_early_is_told_to_look_at_the_keys_first(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, url, _ = places
    saved_run(root, (1,), url, **keys)
    new = make_key(tmp_path / "new")
    as_process()
    both = [*keys["verify_keys"], *new["verify_keys"]]
    with running(root, url, signing_key=new["signing_key"], verify_keys=both) as manager:
        assert manager.resume(new_state()) is not None
    as_process()
    with running(root, url, **new) as manager, pytest.raises(RefusedOnlyCopy) as refused:
        manager.resume(new_state())
    assert refused.value.hint.startswith("Check verify_keys first, on every node")


@pytest.mark.parametrize("name", ["meta_000009.json", "writer.json", f"{CONTROL_DIR}/attempts.json"])
def test_what_says_that_a_later_version_wrote_it_stops_no_start_unless_it_is_signed(
    name: str, places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, url, there = places
    saved_run(root, (1, 2), url, **keys)
    path = (root if name.startswith(CONTROL_DIR) else there) / name
    if name.startswith("meta"):
        path.write_bytes((there / "meta_000002.json").read_bytes())

    def later(document: dict[str, Any]) -> None:
        del document["signature"]
        document.update(version=99, staged_from=url, proof="nobody can tell")

    forged(path, later)
    with running(root, url, **keys) as manager:
        start = manager.resume(new_state())
        assert start is not None
        assert start.step == 2


def test_what_a_later_version_signed_is_not_taken_for_broken(keys: dict[str, Any]) -> None:
    as_process(**keys)
    later = seal("ckptmirror-meta", {"new": "field"}, 99, signing.current().sign)
    with pytest.raises(NewerFormat):
        meta_from_bytes(later)


def test_an_older_list_that_is_put_back_is_told_at_the_next_start(
    places: tuple[Path, str, Path], keys: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its signature is right: only what this root remembers shows it."""
    root, url, there = places
    saved_run(root, (1,), url, **keys)
    older = (there / "writer.json").read_bytes()
    saved_run(root, (2,), url, **keys)
    assert "older state" not in caplog.text
    os.unlink(there / "writer.json")
    (there / "writer.json").write_bytes(older)
    saved_run(root, (3,), url, **keys)
    assert "the mirror shows an older state" in caplog.text


def test_an_emergency_snapshot_is_signed_by_its_rank(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, _, _ = places
    with running(root, persistent_dir=tmp_path / "kept", **keys) as manager:
        state = new_state()
        manager.resume(state)
        train(state)
        manager.save_emergency_checkpoint(1, state)
        wanted = everything(state)
    for home in (root, tmp_path / "elsewhere"):
        with running(home, persistent_dir=tmp_path / "kept", **keys) as manager:
            state = new_state(seed=5)
            assert manager.resume(state) is not None
            assert same(everything(state), wanted)
    (meta,) = (tmp_path / "kept").glob("emergency_*/meta_rank0.json")
    forged(meta, lambda document: document.pop("signature"))
    with pytest.raises(NotSigned):
        meta_from_bytes(meta.read_bytes())


def test_a_rank_that_left_no_meta_is_missing_whatever_is_copied_to_its_name(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    root, _, _ = places
    as_process(**keys)
    attempt, bus = Attempt(new_id(), 1, None), EventBus()
    ranks: Any = SimpleNamespace(rank=0, world_size=2, node=0, nodes=1, node_ranks=(0, 1))
    save_emergency(root, new_state(), run_id=new_id(), attempt=attempt, number=1, step=1, ranks=ranks, bus=bus)
    (meta,) = root.glob("emergency_*/meta_rank0.json")
    meta.with_name("meta_rank1.json").write_bytes(meta.read_bytes())
    found = read_inventory(root)
    assert [(save.meta.is_whole, {one.rank for one in save.meta.artifacts}) for save in found.saves] == [(False, {0})]
    assert [item.why for item in found.broken] == ["holds the meta of rank 0"]


def test_a_rank_whose_meta_was_made_that_of_a_copy_does_not_load_the_files_of_another(
    places: tuple[Path, str, Path], keys: dict[str, Any]
) -> None:
    """A copy proves itself and may lack files; without its own file, rank 1 loaded that of rank 0."""
    root, url, _ = places
    as_process(**keys)
    attempt, bus, run = Attempt(new_id(), 1, None), EventBus(), new_id()
    for rank in (0, 1):
        ranks: Any = SimpleNamespace(rank=rank, world_size=2, node=0, nodes=1, node_ranks=(0, 1))
        save_emergency(root, new_state(), run_id=run, attempt=attempt, number=1, step=1, ranks=ranks, bus=bus)
    assert len(read_inventory(root).saves) == 1
    (meta,) = root.glob("emergency_*/meta_rank1.json")
    as_copy(meta, url, partial=True, lacks=(f"{meta.parent.name}/rank1.pt",))
    found = read_inventory(root)
    assert (found.saves, found.incomplete) == ((), ())
    assert {item.path.name for item in found.broken} == {"meta_rank0.json", "meta_rank1.json"}


def test_a_persistent_copy_with_the_same_crc32c_replaces_nothing_here(
    places: tuple[Path, str, Path], keys: dict[str, Any], tmp_path: Path
) -> None:
    root, _, _ = places
    with running(root, persistent_dir=tmp_path / "kept", **keys) as manager:
        state = new_state()
        manager.resume(state)
        manager.save_emergency_checkpoint(1, state)
    (copy,) = (tmp_path / "kept").glob("emergency_*/rank0.pt")
    bad = with_same_crc32c(copy.read_bytes(), 700)
    copy.unlink()
    copy.write_bytes(bad)
    (listed,) = root.glob("emergency_*/tensors_rank0.json")
    listed.write_bytes(b"x")  # the one here is broken, and has the tensors
    with running(root, persistent_dir=tmp_path / "kept", **keys) as manager, pytest.raises(RefusedOnlyCopy):
        manager.resume(new_state())
    (here,) = root.glob("emergency_*/rank0.pt")
    assert here.read_bytes() != bad


def test_a_legacy_checkpoint_is_signed_by_nobody(tmp_path: Path, keys: dict[str, Any]) -> None:
    save_legacy(tmp_path / "old", 100)
    assert load_checkpoint(tmp_path / "old").model
    use_keys(verify_keys=keys["verify_keys"])
    with pytest.raises((CheckpointNotFound, IntegrityError), match="not signed"):
        load_checkpoint(tmp_path / "old")
    with pytest.raises((CheckpointNotFound, IntegrityError), match="not signed"):
        load_checkpoint(tmp_path / "old" / "dist_ckpt_000100")


# -- keys that are none -----------------------------------------------------------------------------------------------


def test_a_key_that_is_none_or_is_open_to_others_is_refused_by_name(tmp_path: Path, keys: dict[str, Any]) -> None:
    private, (public,) = keys["signing_key"], keys["verify_keys"]
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("hello")
    nothing.chmod(0o600)
    link = tmp_path / "link.pem"
    link.symlink_to(private)
    pipe = tmp_path / "pipe.pem"
    os.mkfifo(pipe, 0o600)
    other = tmp_path / "other.pem"
    other.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    locked = tmp_path / "locked.pem"
    encryption = BestAvailableEncryption(b"secret")
    locked.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    open_to_all = tmp_path / "open.pem"
    open_to_all.write_bytes(private.read_bytes())
    short = tmp_path / "short.pem"  # 32 bytes where an X448 key has 56: OpenSSL calls it an error of its own
    short.write_bytes(
        b"-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VvBCIEI" + b"D" * 43 + b"\n-----END PRIVATE KEY-----\n"
    )
    for path in (other, locked, short):
        path.chmod(0o600)
    open_to_all.chmod(0o640)
    for path, why in (
        (tmp_path / "missing.pem", "there is no"),
        (nothing, "holds no private key"),
        (short, "holds no private key"),
        (public, "may be read or changed by others"),
        (link, "symbolic link"),
        (pipe, "not a regular file"),
        (other, "another kind than Ed25519"),
        (locked, "encrypted"),
        (open_to_all, "may be read or changed by others"),
    ):
        with pytest.raises(ConfigError, match=why) as told:
            CheckpointManager(tmp_path / "root", signing_key=path)
        assert str(path) in str(told.value)
    public.chmod(0o666)
    with pytest.raises(ConfigError, match="may be changed by others"):
        use_keys(verify_keys=[public])
    assert not (tmp_path / "root").exists()


def test_a_process_has_one_set_of_keys_and_signs_if_it_demands(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="signing_key is not"):
        CheckpointManager(tmp_path / "root", verify_keys=keys["verify_keys"])
    as_process(**keys)
    use_keys(**keys)
    use_keys(keys["signing_key"], iter(keys["verify_keys"]))
    use_keys()
    with pytest.raises(ConfigError, match="other keys"):
        use_keys(**make_key(tmp_path / "other"))


def test_a_key_that_nobody_would_believe_writes_nothing(places: tuple[Path, str, Path], keys: dict[str, Any]) -> None:
    root, url, there = places
    saved_run(root, (1, 2), url, **keys)
    lists = root / ".ckptmirror" / "attempts.json", there / "writer.json"
    before = [path.read_bytes() for path in lists]
    wrong = {**make_key(root.parent / "other"), "verify_keys": keys["verify_keys"]}
    signing.set_current(signing.Keys())
    with pytest.raises(ConfigError, match="No file of verify_keys is the public key of signing_key"):
        CheckpointManager(root, [url], **wrong)
    assert not signing.current().identity  # the right ones may be used now
    as_settings = {
        "CKPTMIRROR_SIGNING_KEY": str(wrong["signing_key"]),
        "CKPTMIRROR_VERIFY_KEYS": str(wrong["verify_keys"][0]),
    }
    for verb in (("rewind", "--step", "1"), ("drain",), ("forget-mirror", "--url", url)):
        ended = run(*verb[:1], "--root", root, *verb[1:], env=as_settings)
        assert_tells(ended, 10, "would not be believed", "openssl pkey", stdout=None)
    assert [path.read_bytes() for path in lists] == before


def test_who_has_no_keys_imports_no_cryptography(tmp_path: Path) -> None:
    text = "import sys, ckptmirror; ckptmirror.use_keys(); ckptmirror.list_checkpoints(sys.argv[1]); "
    text += "sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False).returncode == 0
