"""Names: what is built parses back, and nothing else parses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_builders import ids, ranks, steps, tags
from hypothesis import given
from hypothesis import strategies as st

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta, UsageError
from ckptmirror.core.names import ParsedName, SaveName, build_name, parse_artifact_path, parse_name

SAVE_ID = "1f0c9a2e" + "0" * 24
UTC = "20261121T131500Z"


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("meta_000200.json", ParsedName("meta", 200)),
        ("meta_000200-1f0c9a2e.json", ParsedName("meta", 200, "1f0c9a2e")),
        ("model_000200.pt", ParsedName("model", 200)),
        ("model_1234567.pt", ParsedName("model", 1234567)),
        ("model_000200-1f0c9a2e.pt", ParsedName("model", 200, "1f0c9a2e")),
        ("optim_000200_rank3.pt", ParsedName("optim", 200, rank=3)),
        ("extra_000200_rank0.pt", ParsedName("extra", 200, rank=0)),
        ("extra_000200-1f0c9a2e_rank12.pt", ParsedName("extra", 200, "1f0c9a2e", rank=12)),
        ("tensors_000200_rank3.json", ParsedName("tensors", 200, rank=3)),
        ("dcp_000200", ParsedName("dcp", 200)),
        ("dcp_000000", ParsedName("dcp", 0)),
        (f"emergency_step_000200_{UTC}", ParsedName("emergency", 200, utc=UTC)),
        (f"emergency_step_000200-1f0c9a2e_{UTC}", ParsedName("emergency", 200, "1f0c9a2e", utc=UTC)),
        (
            "parts/meta_000200-1f0c9a2e.part00001-of-00002.json",
            ParsedName("part", 200, "1f0c9a2e", part=1, parts=2),
        ),
        ("latest", ParsedName("latest")),
        ("writer.json", ParsedName("writer")),
        (".ckptmirror", ParsedName("control")),
        ("dist_ckpt_000200", ParsedName("legacy_dcp", 200)),
        ("extra_000200.pt", ParsedName("legacy_extra", 200)),
        ("meta.json", ParsedName("legacy_meta")),
        ("extra_state.pt", ParsedName("legacy_extra_state")),
        ("model_000200.pt.1f0c9a2e.tmp", ParsedName("tmp", 200, final="model_000200.pt", save="1f0c9a2e")),
        ("latest.1f0c9a2e.tmp", ParsedName("tmp", final="latest", save="1f0c9a2e")),
    ],
)
def test_every_name_of_the_design_parses_and_is_built_again(name: str, parsed: ParsedName) -> None:
    assert parse_name(name) == parsed
    assert build_name(parsed) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model_0000200.pt",
        "model_200.pt",
        "model_00200.pt",
        "model_0001234567.pt",
        "model_000200.pt\n",
        "\nmodel_000200.pt",
        " model_000200.pt",
        "xmodel_000200.pt",
        "model_000200.pt.bak",
        "model_000200.pt.tmp",
        "model_000200.pt.1f0c9a2.tmp",
        "model_000200.pt.1F0C9A2E.tmp",
        "model_000200.pt.1f0c9a2e.tmp.1f0c9a2e.tmp",
        "notes.txt.1f0c9a2e.tmp",
        "meta.json.1f0c9a2e.tmp",
        "dist_ckpt_000200.1f0c9a2e.tmp",
        "model_٠٠٠٢٠٠.pt",
        "model_-00200.pt",
        "model_000200-1F0C9A2E.pt",
        "model_000200-1f0c9a2.pt",
        "model_000200-1f0c9a2e0.pt",
        "model_000200_rank3.pt",
        "optim_000200.pt",
        "optim_000200_rank03.pt",
        "optim_000200_rank-1.pt",
        "tensors_000200_rank3.pt",
        "dcp_000200/",
        "dcp_000200/__0_0.distcp",
        "dcp_200",
        "dcp_000200_old",
        "step_000200",
        "emergency_step_000200",
        "emergency_step_000200_2026-11-21",
        "emergency_step_000200_20261121T131500",
        "parts/meta_000200.part00001-of-00002.json",
        "parts/meta_000200-1f0c9a2e.part00000-of-00002.json",
        "parts/meta_000200-1f0c9a2e.part00003-of-00002.json",
        "parts/meta_000200-1f0c9a2e.part1-of-2.json",
        "meta_000200-1f0c9a2e.part00001-of-00002.json",
        "parts/model_000200.pt",
        "latest.json",
        "attempts.json",
        "x.1f0c9a2e.tmp" * 2000,
    ],
)
def test_nothing_else_parses(name: str) -> None:
    assert parse_name(name) is None


def test_step_parse_is_exact() -> None:
    assert parse_name("model_000200.pt") == ParsedName("model", 200)
    assert parse_name("model_1000200.pt") == ParsedName("model", 1000200)
    for wrong in ("model_0000200.pt", "model_200.pt", "amodel_000200.pt", "model_000200.ptx", "dcp_0002000.pt"):
        assert parse_name(wrong) is None
    assert names.parse_step("200") == names.parse_step("000200") == 200


@given(steps, tags, ranks)
def test_names_of_a_save_parse_back(step: int, tag: str, rank: int) -> None:
    name = SaveName(step, tag)
    assert parse_name(name.meta) == ParsedName("meta", step, tag)
    assert parse_name(name.model) == ParsedName("model", step, tag)
    assert parse_name(name.dcp_dir) == ParsedName("dcp", step, tag)
    assert parse_name(name.optim(rank)) == ParsedName("optim", step, tag, rank)
    assert parse_name(name.extra(rank)) == ParsedName("extra", step, tag, rank)
    assert parse_name(name.tensors(rank)) == ParsedName("tensors", step, tag, rank)
    assert parse_name(names.emergency_dir_name(step, UTC, tag)) == ParsedName("emergency", step, tag, utc=UTC)


@given(steps, ids, st.integers(1, 10**6), st.integers(0, 10**6))
def test_part_names_parse_back(step: int, save_id: str, part: int, more: int) -> None:
    name = names.part_name(step, save_id, part, part + more)
    assert parse_name(name) == ParsedName("part", step, save_id[:8], part=part, parts=part + more)


@given(steps, tags, ids)
def test_temporaries_parse_back_and_are_no_final_names(step: int, tag: str, save_id: str) -> None:
    final = SaveName(step, tag).model
    name = names.tmp_name(final, save_id)
    assert parse_name(name) == ParsedName("tmp", step, tag, final=final, save=save_id[:8])
    assert names.is_tmp_name(name)
    assert names.is_tmp_name(f"dcp_000001/{name}")
    assert not names.is_tmp_name(final)
    assert parse_artifact_path(name) is None


@given(st.text())
def test_parsing_never_fails_and_what_parses_is_built_again(name: str) -> None:
    parsed = parse_name(name)
    if parsed is not None:
        assert build_name(parsed) == name
    parse_artifact_path(name)


@given(
    st.from_regex(
        r"(meta|model|optim|extra|tensors|dcp|emergency_step|dist_ckpt)_[0-9]{1,8}(-[0-9a-f]{7,9})?(_rank[0-9]{1,3})?"
        r"(\.pt|\.json)?(\.[0-9a-f]{8}\.tmp)?",
        fullmatch=True,
    )
)
def test_names_that_look_like_ours_parse_only_if_they_are_built_the_same(name: str) -> None:
    parsed = parse_name(name)
    if parsed is not None:
        assert build_name(parsed) == name


@given(steps, steps)
def test_steps_are_ordered_as_integers(one: int, other: int) -> None:
    parsed = [parse_name(SaveName(step).model) for step in (one, other)]
    assert [name.step for name in parsed if name is not None] == [one, other]


@given(steps, ids, ranks)
def test_tagging_is_undone_by_untagging(step: int, save_id: str, rank: int) -> None:
    name = SaveName(step)
    for path in (name.meta, name.model, name.optim(rank), f"{name.dcp_dir}/pp0/__0_0.distcp"):
        tagged = names.tagged(path, save_id)
        assert tagged != path
        assert names.untagged(tagged) == path == names.untagged(path)
        assert names.tagged(tagged, save_id) == tagged


def test_tagging_refuses_another_saves_tag_and_foreign_names() -> None:
    with pytest.raises(UsageError):
        names.tagged("model_000200-aaaaaaaa.pt", SAVE_ID)
    for path in ("notes.txt", "latest", "parts/meta_000200-1f0c9a2e.part00001-of-00002.json", "dist_ckpt_000200/x"):
        with pytest.raises(UsageError):
            names.tagged(path, SAVE_ID)


@pytest.mark.parametrize(
    ("path", "role", "below"),
    [
        ("model_000200.pt", "model", ""),
        ("dcp_000200/.metadata", "dcp", ".metadata"),
        ("dcp_000200/pp0/__0_0.distcp", "dcp", "pp0/__0_0.distcp"),
        (f"emergency_step_000200_{UTC}/rank3.pt", "emergency", "rank3.pt"),
    ],
)
def test_artifact_paths_are_taken_apart(path: str, role: str, below: str) -> None:
    parsed = parse_artifact_path(path)
    assert parsed is not None
    assert (parsed.top.role, parsed.top.step, parsed.below) == (role, 200, below)


@pytest.mark.parametrize(
    "path",
    [
        "meta_000200.json",
        "latest",
        "writer.json",
        ".ckptmirror",
        ".ckptmirror/attempts.json",
        ".ckptmirror/uploads.db",
        "pins/000200.json",
        "parts/meta_000200-1f0c9a2e.part00001-of-00002.json",
        "dcp_000200",
        "dcp_000200/",
        "model_000200.pt/x",
        "dcp_000200/.metadata.tmp",
        "dcp_000200/a.tmp/b",
        "dcp_000200.1f0c9a2e.tmp/.metadata",
        f"emergency_step_000200_{UTC}/meta_rank3.json",
        "dist_ckpt_000200/.metadata",
        "extra_000200.pt",
        "meta.json",
    ],
)
def test_no_artifact_has_the_name_of_something_else(path: str) -> None:
    assert parse_artifact_path(path) is None


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 200", "200\n", "2_00", "latest", "٢٠٠", "1" * 19, "0x10"])
def test_what_is_not_a_step_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        names.parse_step(text)


@pytest.mark.parametrize("step", [-1, True, 10**18, 1.5, "200"])
def test_a_save_name_refuses_what_is_not_a_step(step: object) -> None:
    with pytest.raises(UsageError):
        SaveName(step)  # type: ignore[arg-type]


def test_builders_refuse_what_would_not_parse() -> None:
    for call in (
        lambda: SaveName(1, "ABCDEF01"),
        lambda: SaveName(1, "../../etc"),
        lambda: SaveName(1).optim(-1),
        lambda: names.emergency_dir_name(1, "now"),
        lambda: names.part_name(1, SAVE_ID, 0, 2),
        lambda: names.part_name(1, SAVE_ID, 3, 2),
        lambda: names.part_name(1, "xyz", 1, 2),
        lambda: names.tmp_name("", SAVE_ID),
        lambda: names.tmp_name("dcp_000001/", SAVE_ID),
        lambda: names.pp_dir(-1),
    ):
        with pytest.raises(UsageError):
            call()
    assert names.pp_dir(0) == "pp0/"


def test_build_refuses_a_name_without_its_numbers() -> None:
    for parsed in (ParsedName("meta"), ParsedName("optim", 1), replace(ParsedName("part", 1), tag="1f0c9a2e")):
        with pytest.raises(UsageError):
            build_name(parsed)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/etc/passwd", "..", ".", "a/../b", "a/..", "../a", "./a", "a/./b", "a//b", "a/", "//a", "a\\b",
        "a\0b", "a\nb", "a\x7fb", "a\x85b", "a\u2028b", "\ud800", "a" * 256, "a/" * 600 + "a", "é" * 128,
    ],
)  # fmt: skip
def test_hostile_paths_are_refused(path: str) -> None:
    with pytest.raises(BrokenMeta):
        names.check_relative_path(path)


@pytest.mark.parametrize("path", ["a", ".metadata", "...", "dcp_000200/__0_0.distcp", "a/b/c", "é", "a b", "..a/b.."])
def test_harmless_paths_are_returned_as_they_are(path: str) -> None:
    assert names.check_relative_path(path) == path


@given(st.text(max_size=40))
def test_a_path_is_returned_or_refused_and_never_leaves_its_directory(path: str) -> None:
    try:
        checked = names.check_relative_path(path)
    except BrokenMeta:
        return
    assert checked == path
    assert not path.startswith("/")
    assert not {"", ".", ".."} & set(path.split("/"))
