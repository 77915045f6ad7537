"""The codec: what is written is read back, and what is not exactly that is refused with the reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from core_builders import RUN_ID, Change, a_meta, digest_of, id_of, ids, metas, put, resealed, steps
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core.codec import (
    attempts_from_bytes,
    attempts_to_bytes,
    health_from_bytes,
    health_to_bytes,
    meta_from_bytes,
    meta_or_tombstone_from_bytes,
    meta_to_bytes,
    tombstone_to_bytes,
)
from ckptmirror.core.errors import BrokenMeta, NewerFormat
from ckptmirror.core.model import (
    MIN_BLOCK_SIZE_BYTES,
    SIGNS,
    Artifact,
    Attempt,
    AttemptHealth,
    AttemptList,
    Requirement,
    SaveRef,
    Tombstone,
)
from ckptmirror.core.plain_values import finite_metrics, plain_values

TOMBSTONE = Tombstone(id_of("save"), 200, ("dcp",), "keep_last=2", "2026-11-21T13:15:00+00:00")


# -- round trips --------------------------------------------------------------------------------------------


@given(metas())
def test_metas_are_read_back_as_they_were_written(meta: Any) -> None:
    data = meta_to_bytes(meta)
    assert meta_from_bytes(data) == meta == meta_or_tombstone_from_bytes(data)
    assert meta_to_bytes(meta_from_bytes(data)) == data


def test_output_is_canonical() -> None:
    data = meta_to_bytes(a_meta(fields={"b": "é", "a": 1}))
    assert data.isascii()
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 1
    assert data == meta_to_bytes(a_meta(fields={"a": 1, "b": "é"}))
    document = json.loads(data)
    assert list(document) == sorted(document)
    assert (document["format"], document["version"]) == ("ckptmirror-meta", 1)


def test_blocks_are_base64_of_big_endian_numbers() -> None:
    digest = digest_of(2 * MIN_BLOCK_SIZE_BYTES, 1, 0x01020304)
    data = meta_to_bytes(a_meta(artifacts=(Artifact("model_000200.pt", ("model",), 0, digest),)))
    assert base64.b64decode(json.loads(data)["artifacts"][0]["blocks"]) == bytes([0, 0, 0, 1, 1, 2, 3, 4])


def test_white_space_and_the_order_of_keys_do_not_matter_to_a_reader() -> None:
    document = json.loads(meta_to_bytes(a_meta()))
    pretty = json.dumps(dict(reversed(document.items())), indent=2).encode()
    assert meta_from_bytes(pretty) == a_meta()


@given(st.builds(Tombstone, ids, steps, st.just(("dcp", "model")), st.just("why"), st.just("2026")))
def test_tombstones_are_read_back(tombstone: Tombstone) -> None:
    data = tombstone_to_bytes(tombstone)
    assert meta_or_tombstone_from_bytes(data) == tombstone


@given(st.lists(st.tuples(ids, st.integers(0, 99), st.booleans(), st.booleans()), unique_by=lambda t: t[0], max_size=5))
def test_lists_of_attempts_are_read_back_in_the_order_of_their_numbers(items: list[Any]) -> None:
    ref = SaveRef(id_of("P"), 3, 200, id_of("p3"))
    attempts = [Attempt(i, n, ref if decided and rooted else None, decided) for i, n, decided, rooted in items]
    data = attempts_to_bytes(AttemptList(RUN_ID, tuple(attempts)))
    found = attempts_from_bytes(data)
    assert found.attempts == tuple(sorted(attempts, key=lambda a: (a.number, a.id)))
    assert attempts_to_bytes(AttemptList(RUN_ID, tuple(reversed(attempts)))) == data


@given(st.dictionaries(ids, st.frozensets(st.sampled_from(SIGNS)), max_size=5))
def test_the_health_of_attempts_is_read_back_in_its_order(signs: Any) -> None:
    health = AttemptHealth(RUN_ID, signs)
    found = health_from_bytes(health_to_bytes(health))
    assert found == health
    assert list(found.signs) == list(signs)


def test_of_the_health_of_attempts_only_the_newest_are_kept_and_later_signs_are_left_out() -> None:
    health = AttemptHealth(RUN_ID)
    for number in range(300):
        health = health.with_sign(id_of(f"attempt {number}"), "reported")
    data = health_to_bytes(health.with_sign(id_of("attempt 299"), "ended"))
    found = health_from_bytes(resealed(lambda d: d["attempts"][-1]["signs"].append("rested"), data)).signs
    assert list(found) == [id_of(f"attempt {number}") for number in range(44, 300)]
    assert found[id_of("attempt 299")] == {"reported", "ended"}
    with pytest.raises(BrokenMeta, match=r"attempts\[0\].signs"):
        health_from_bytes(resealed(lambda d: d["attempts"][0].update(signs="reported"), data))


def test_one_format_is_not_taken_for_another() -> None:
    meta, tombstone = meta_to_bytes(a_meta()), tombstone_to_bytes(TOMBSTONE)
    attempts = attempts_to_bytes(AttemptList(RUN_ID))
    wrong: list[tuple[Callable[[bytes], Any], bytes]] = [
        (meta_from_bytes, tombstone),
        (meta_from_bytes, attempts),
        (attempts_from_bytes, meta),
        (meta_or_tombstone_from_bytes, attempts),
    ]
    for read, data in wrong:
        with pytest.raises(BrokenMeta, match="format is"):
            read(data)


# -- refusals: the form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[]", "not an object"),
        (b"null", "not an object"),
        (b"{}", "format is None"),
        (b'{"format": ["ckptmirror-meta"]}', "format is a list"),
        (b'{"format": "ckptmirror-meta"}', "version is None"),
        (b'{"format": "ckptmirror-meta", "version": 3}', "version is 3"),
        (b'{"format": "ckptmirror-meta", "version": true}', "version is True"),
        (b'{"format": "ckptmirror-meta", "version": 1.0}', "version is 1.0"),
        (b'{"format": "ckptmirror-meta", "version": 1}', "checksum is None"),
        (b'{"format": "ckptmirror-meta", "version": 1, "checksum": {}}', "checksum is a dict"),
        (b'{"a": 1, "a": 1}', "appears twice"),
        (b'{"x": {"a": 1, "\\u0061": 1}}', "appears twice"),
        (b'{"a": NaN}', "not a finite number"),
        (b'{"a": -Infinity}', "not a finite number"),
        (b'{"a": 1e999}', "not a finite number"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "digits"),
        (b'{"a": -' + b"9" * 60 + b"}", "digits"),
        (b'{"a": 0.' + b"0" * 5000 + b"1}", "not a finite number"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"format": "ckptmirror-meta", "version": 1, "a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than"),
        (b"[" * 2_000_001, "too many values"),
        (b"," * 8_000_001, "too many values"),
        (b" " * (64 * 1024 * 1024 + 1), "the limit is"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_sealed_json_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BrokenMeta, match=reason):
        meta_from_bytes(data)


def test_a_checksum_that_is_not_that_of_the_content_is_refused() -> None:
    data = meta_to_bytes(a_meta())
    with pytest.raises(BrokenMeta, match="not that of the content"):
        meta_from_bytes(data.replace(b'"save_number":1', b'"save_number":2'))


def test_a_newer_version_is_refused_with_a_hint() -> None:
    data = resealed(put("version", 3))
    with pytest.raises(BrokenMeta, match="version is 3") as caught:
        meta_from_bytes(data)
    assert "newer ckptmirror" in caught.value.hint


# -- refusals: the fields -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("surprise", 1), "it has the unknown field 'surprise'"),
        (lambda d: d.pop("step"), "step is missing"),
        (put("step", -1), "step is -1, not between"),
        (put("step", True), "step is a boolean, not an integer"),
        (put("step", 200.0), "step is a number, not an integer"),
        (put("step", 10**30), "step is 1"),
        (put("step", "200"), "step is text, not an integer"),
        (put("step", 201), r"artifacts\[0\].path is of step 200, the meta of step 201"),
        (put("run_id", "x"), "run_id is not an id"),
        (put("run_id", "A" * 32), "run_id is not an id"),
        (put("save_id", None), "save_id is not an id"),
        (put("save_number", 0), "save_number is 0"),
        (put("kinds", []), "kinds is not a list of different kinds"),
        (put("kinds", ["dcp", "dcp"]), "kinds is not a list of different kinds"),
        (put("kinds", ["dcp", "zip"]), "kinds is not a list of different kinds"),
        (put("kinds", ["dcp", []]), "kinds is not a list of different kinds"),
        (put("kinds", "dcp"), "kinds is text, not a list"),
        (put("kinds", ["dcp", "emergency"]), "kinds mixes emergency with others"),
        (put("kinds", ["dcp"]), r"artifacts\[2\].kinds has a kind that the meta does not have"),
        (put("world_size", 0), "world_size is 0"),
        (put("nodes", 3), "nodes is 3, more than world_size"),
        (put("node", 1), "node is 1, not between 0 and 0"),
        (put("node", -1), "node is -1, not between 0 and 0"),
        (put("tag", "xyz"), "tag is not that of save_id"),
        (put("tag", id_of("other")[:8]), "tag is not that of save_id"),
        (put("tag", id_of("save")[:8]), r"artifacts\[0\].path has the tag ''"),
        (put("attempt", None), "attempt is null, not an object"),
        (put("attempt", "id", "x"), "attempt.id is not an id"),
        (put("attempt", "number", -1), "attempt.number is -1"),
        (put("attempt", "decided", 1), "attempt.decided is an integer"),
        (put("attempt", "decided", False), "attempt.decided is false"),
        (put("attempt", "parent", {}), "attempt.parent.attempt is missing"),
        (put("attempt", "extra", 0), "attempt has the unknown field"),
        (put("training_config", []), "training_config is a list, not an object"),
        (put("fields", "x"), "fields is text"),
        (put("metrics", {"loss": "1"}), "metrics.loss is not a finite number"),
        (put("metrics", {"loss": True}), "metrics.loss is not a finite number"),
        (put("metrics", {"loss": None}), "metrics.loss is not a finite number"),
        (put("architecture_hash", 1), "architecture_hash is an integer, not text"),
        (put("created_at_utc", "x" * 65), "created_at_utc is longer"),
        (put("created_at_utc", "now\n"), "created_at_utc has characters"),
        (put("staged_from", 5), "staged_from is an integer"),
        (put("partial", 1), "partial is an integer"),
        (put("partial", True), "partial is true, but only a staged copy"),
        (put("artifacts", {}), "artifacts is an object, not a list"),
        (put("artifacts", [1]), r"artifacts\[0\] is an integer, not an object"),
        (put("artifacts", 0, "more", 1), r"artifacts\[0\] has the unknown field 'more'"),
        (put("artifacts", 0, "rank", -1), r"artifacts\[0\].rank is neither"),
        (put("artifacts", 0, "rank", False), r"artifacts\[0\].rank is neither"),
        (put("artifacts", 0, "size_bytes", -1), r"artifacts\[0\].size_bytes is -1"),
        (put("artifacts", 0, "size_bytes", 2**63), r"artifacts\[0\].size_bytes is"),
        (put("artifacts", 0, "crc32c", 2**32), r"artifacts\[0\].crc32c is"),
        (put("artifacts", 0, "crc32c", 0), r"artifacts\[0\].crc32c is not the combination"),
        (put("artifacts", 1, "crc32c", 7), r"artifacts\[1\].crc32c is not the combination"),
        (put("artifacts", 2, "crc32c", 7), r"artifacts\[2\].crc32c is not the combination"),
        (put("artifacts", 0, "block_size_bytes", MIN_BLOCK_SIZE_BYTES + 1), "not a power of two"),
        (put("artifacts", 0, "block_size_bytes", MIN_BLOCK_SIZE_BYTES // 2), "block_size_bytes is"),
        (put("artifacts", 0, "blocks", ""), r"artifacts\[0\].blocks has 0 bytes"),
        (put("artifacts", 0, "blocks", "AAAAAAAAAAA="), r"artifacts\[0\].blocks has 8 bytes"),
        (put("artifacts", 0, "blocks", "AAA"), r"artifacts\[0\].blocks is not base64"),
        (put("artifacts", 0, "blocks", "AA\nAA=="), r"artifacts\[0\].blocks is not base64"),
        (put("artifacts", 0, "blocks", "AAAAAB=="), r"artifacts\[0\].blocks is not canonical base64"),
        (put("artifacts", 0, "blocks", "é"), r"artifacts\[0\].blocks is not base64"),
        (put("artifacts", 0, "blocks", "A" * 100_000), r"artifacts\[0\].blocks is not base64 of at most"),
        (put("artifacts", 0, "blocks", []), r"artifacts\[0\].blocks is not base64"),
        (put("artifacts", 0, "size_bytes", 2**40), r"artifacts\[0\].blocks has 4 bytes"),
        (put("artifacts", 3, "kinds", ["dcp"]), r"artifacts\[3\].kinds does not fit its path"),
        (put("artifacts", 0, "object", "dcp_000200/.metadata"), r"artifacts\[0\].object repeats the path"),
    ],
)  # fmt: skip
def test_every_field_is_checked_and_named(change: Change, reason: str) -> None:
    with pytest.raises(BrokenMeta, match=reason):
        meta_from_bytes(resealed(change))


@pytest.mark.parametrize(
    "path",
    [
        ".ckptmirror/attempts.json", "writer.json", "latest", "meta_000200.json", "meta_000200-1f0c9a2e.json",
        "/etc/passwd", "../x", "dcp_000200/../x", "dcp_000200/..", "dcp_000200//x", "dcp_000200/", "dcp_000200",
        "dcp_000200/a\\b", "dcp_000200/.metadata.tmp", "dcp_000201/x", "dcp_000200-aaaaaaaa/x", "model_000201.pt",
        "model_200.pt", "notes.txt", "", "emergency_step_000200_20261121T131500Z/rank0.pt", "extra_000200.pt",
        "dcp_000200/" + "x" * 300, "dcp_000200/\u202e", "dcp_000200/\ud800",
    ],
)  # fmt: skip
@pytest.mark.parametrize("field", ["path", "object"])
def test_a_meta_names_nothing_but_its_own_files(path: str, field: str) -> None:
    with pytest.raises(BrokenMeta, match=r"artifacts\[0\]"):
        meta_from_bytes(resealed(put("artifacts", 0, field, path)))


def test_an_object_differs_from_its_path_by_this_saves_tag_only() -> None:
    tag = id_of("save")[:8]
    read = meta_from_bytes(resealed(put("artifacts", 0, "object", f"dcp_000200-{tag}/.metadata")))
    assert read.artifacts[0].object_name == f"dcp_000200-{tag}/.metadata"
    for other in (f"dcp_000200-{tag}/__0_0.distcp", "model_000200.pt", "dcp_000200-00000000/.metadata"):
        with pytest.raises(BrokenMeta, match=r"artifacts\[0\].object is not a name of this artifact"):
            meta_from_bytes(resealed(put("artifacts", 0, "object", other)))


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ("x", "x", "appears twice"),
        ("a", "A", "appears twice"),
        ("é", "e\u0301", "appears twice"),
        ("x", "x/y", "is a directory of"),
        ("X", "x/y/z", "is a directory of"),
    ],
)
def test_paths_that_would_overwrite_one_another_are_refused(one: str, other: str, reason: str) -> None:
    for pair in ((one, other), (other, one)):
        artifacts = tuple(Artifact(f"dcp_000200/{name}", ("dcp",), 0, digest_of(1)) for name in pair)
        with pytest.raises(BrokenMeta, match=reason):
            meta_to_bytes(a_meta(artifacts=artifacts))


def test_two_artifacts_do_not_share_an_object() -> None:
    tag = id_of("save")[:8]
    artifacts = (Artifact(f"model_000200-{tag}.pt", ("model",), 0, digest_of(1), "model_000200.pt"),)
    assert meta_to_bytes(a_meta(tag=tag, artifacts=artifacts))
    with pytest.raises(BrokenMeta, match="appears twice"):
        meta_to_bytes(a_meta(tag=tag, artifacts=artifacts * 2))


def test_emergency_metas_name_files_of_one_emergency_directory_and_nothing_else() -> None:
    directory = "emergency_step_000200_20261121T131500Z"
    good = Artifact(f"{directory}/rank0.pt", ("emergency",), 0, digest_of(9))
    meta = a_meta(kinds=("emergency",), artifacts=(good,))
    assert meta_from_bytes(meta_to_bytes(meta)) == meta
    for bad, reason in (
        (replace(good, path="emergency_step_000200_20261121T131501Z/rank1.pt"), "more than one emergency directory"),
        (replace(good, path="extra_000200_rank0.pt"), "kinds does not fit"),
        (replace(good, path=f"{directory}/meta_rank1.json"), "not the name of an artifact"),
    ):
        with pytest.raises(BrokenMeta, match=reason):
            meta_to_bytes(replace(meta, artifacts=(good, bad)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training_config": {"dtype": object()}}, "training_config.dtype is a object"),
        ({"training_config": {1: 2}}, "training_config has the key 1"),
        ({"metrics": {"loss": float("nan")}}, "metrics.loss is nan"),
        ({"fields": {"x": float("inf")}}, "fields.x is inf"),
        ({"fields": {"x": 10**50}}, "fields.x has more than 40 digits"),
        ({"save_number": 0}, "save_number is 0"),
        ({"created_at_utc": "\0"}, "created_at_utc has characters"),
        (
            {"artifacts": (Artifact("model_000200.pt", ("model",), 0, replace(digest_of(1), blocks=(-1,))),)},
            "not a 32-bit",
        ),
        ({"artifacts": (Artifact("model_000200.pt", ("model",), 0, replace(digest_of(1), crc32c=5)),)}, "combination"),
    ],
)
def test_what_could_not_be_read_back_is_never_written(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BrokenMeta, match=reason):
        meta_to_bytes(a_meta(**changes))


def test_tombstones_and_attempts_are_checked_too() -> None:
    with pytest.raises(BrokenMeta, match="reason is a number"):
        meta_or_tombstone_from_bytes(resealed(put("reason", 1.5), tombstone_to_bytes(TOMBSTONE)))
    data = attempts_to_bytes(AttemptList(RUN_ID, (Attempt(id_of("A"), 0, None),)))
    with pytest.raises(BrokenMeta, match="twice"):
        attempts_from_bytes(resealed(lambda d: d["attempts"].append(d["attempts"][0]), data))
    with pytest.raises(BrokenMeta, match=r"attempts\[0\].number is missing"):
        attempts_from_bytes(resealed(lambda d: d["attempts"][0].pop("number"), data))
    parent = {"attempt": id_of("P"), "number": 1, "step": 1, "save_id": id_of("p")}
    with pytest.raises(BrokenMeta, match=r"attempts\[0\].parent is known, but decided is false"):
        attempts_from_bytes(resealed(lambda d: d["attempts"][0].update(parent=parent, decided=False), data))
    with pytest.raises(BrokenMeta):
        attempts_to_bytes(AttemptList("not an id"))


def test_what_a_list_says_of_mirrors_is_read_back_and_checked() -> None:
    requirements = (Requirement("gs://a", 3, is_removed=True), Requirement("gs://b", 4))
    data = attempts_to_bytes(AttemptList(RUN_ID, requirements=requirements[::-1]))
    assert attempts_from_bytes(data).requirements == requirements
    wrong: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda d: d["requirements"].append(d["requirements"][0]), "names a mirror twice"),
        (lambda d: d["requirements"][1].update(url=""), r"requirements\[1\].url is empty"),
        (lambda d: d["requirements"][1].update(number=-1), r"requirements\[1\].number is -1"),
        (lambda d: d["requirements"][1].update(since=2), "unknown field"),
        (lambda d: d.update(requirements=d["requirements"][:1] * 1001), "1001 items"),
    ]
    for change, why in wrong:
        with pytest.raises(BrokenMeta, match=why):
            attempts_from_bytes(resealed(change, data))


# -- what users give ----------------------------------------------------------------------------------------


class Odd:
    def __str__(self) -> str:
        return "odd"


def test_odd_values_of_a_training_config_become_text() -> None:
    given_config = {"a": (1, 2), "b": {3}, 4: Odd(), "c": float("nan"), "d": 10**60, "e": {"f": [None, True, 0.5]}}
    plain = plain_values(given_config)
    assert plain == {"a": [1, 2], "b": [3], "4": "odd", "c": "nan", "d": hex(10**60), "e": {"f": [None, True, 0.5]}}
    assert meta_from_bytes(meta_to_bytes(a_meta(training_config=plain))).training_config == plain


def test_a_config_that_contains_itself_becomes_text_at_some_depth() -> None:
    config: dict[str, Any] = {}
    config["self"] = config
    assert meta_to_bytes(a_meta(training_config=plain_values(config)))


def test_metrics_that_are_not_finite_are_left_out_and_named() -> None:
    kept, dropped = finite_metrics(
        {"a": 1, "b": float("nan"), "c": "2.5", "d": object(), "e": float("inf"), "f": 10**400}
    )
    assert kept == {"a": 1.0, "c": 2.5}
    assert dropped == ("b", "d", "e", "f")


def test_messages_about_hostile_keys_are_short_and_safe_to_print() -> None:
    hostile = {"\x1b[2J" + "x" * 9999: {"\ud800": [[float("nan")]]}}
    with pytest.raises(BrokenMeta) as caught:
        meta_to_bytes(a_meta(fields=hostile))
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
    with pytest.raises(BrokenMeta) as caught:
        meta_from_bytes(resealed(put("metrics", {"\x1b[2J": "1"})))
    assert str(caught.value) == r"metrics.\x1b[2J is not a finite number."


def test_a_flipped_bit_in_the_version_is_damage_and_no_later_version() -> None:
    data = meta_to_bytes(a_meta())
    assert data.count(b'"version":1') == 1
    with pytest.raises(BrokenMeta, match="version is 3") as damaged:
        meta_from_bytes(data.replace(b'"version":1', b'"version":3'))
    assert not isinstance(damaged.value, NewerFormat)
    with pytest.raises(NewerFormat):
        meta_from_bytes(resealed(put("version", 3)))


def test_a_staged_copy_that_does_not_say_whether_it_is_partial_is_taken_for_partial() -> None:
    staged = replace(a_meta(), staged_from="gs://bucket/run")
    assert not meta_from_bytes(meta_to_bytes(staged)).partial
    assert meta_from_bytes(resealed(lambda document: document.pop("partial"), meta_to_bytes(staged))).partial
    assert "partial" not in json.loads(meta_to_bytes(a_meta()))
