"""Every name on disk and on the mirror: built here, parsed here, nowhere else.

Rules:
* One exact ASCII pattern must match the whole name; nothing matches by substring. All other names are foreign.
* Steps are zero-padded to six digits and grow past them; other padding is foreign. They are ordered as integers.
* If another save already uses a name, ``-`` and the first eight digits of the save id (the *tag*) follow the step.
* A temporary is in the directory of its final name, as ``<final>.<eight digits of the save id>.tmp``.
* :func:`build_name` is the inverse of :func:`parse_name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ckptmirror.core.errors import UsageError
from ckptmirror.core.paths import check_relative_path

__all__ = [
    "ATTEMPTS_NAME",
    "CONTROL_DIR",
    "EVENTS_NAME",
    "HEALTH_NAME",
    "LATEST_NAME",
    "LOCK_NAME",
    "MAX_STEP",
    "NO_TIME",
    "OLDER_EVENTS_NAME",
    "PARTS_DIR",
    "PINS_DIR",
    "ROTATE_LOCK_NAME",
    "STATUS_NAME",
    "TABLE_NAME",
    "TABLE_NOTE_NAME",
    "TRASH_DIR",
    "WRITER_NAME",
    "ArtifactPath",
    "ParsedName",
    "Role",
    "SaveName",
    "build_name",
    "check_relative_path",
    "diverged_attempt",
    "diverged_name",
    "emergency_dir_name",
    "emergency_files",
    "emergency_meta_name",
    "is_of_a_rank",
    "is_tmp_name",
    "parse_artifact_path",
    "parse_name",
    "parse_step",
    "part_name",
    "parts_prefix",
    "plain",
    "plain_steps",
    "pp_dir",
    "tagged",
    "tmp_name",
    "untagged",
]

CONTROL_DIR = ".ckptmirror"
ATTEMPTS_NAME = f"{CONTROL_DIR}/attempts.json"
MET_NAME = f"{CONTROL_DIR}/met.json"  # the attempts that fenced one of this root
HEALTH_NAME = f"{CONTROL_DIR}/health.json"  # how far attempts of this root got
STATUS_NAME = f"{CONTROL_DIR}/status.json"
TABLE_NAME = f"{CONTROL_DIR}/uploads.db"
TABLE_NOTE_NAME = f"{CONTROL_DIR}/table.json"  # where the table is, if elsewhere
LOCK_NAME = f"{CONTROL_DIR}/lock"
ROTATE_LOCK_NAME = f"{CONTROL_DIR}/rotate.lock"
TRASH_DIR = f"{CONTROL_DIR}/trash"
EVENTS_NAME = f"{CONTROL_DIR}/events.jsonl"
OLDER_EVENTS_NAME = f"{CONTROL_DIR}/events.older.jsonl"
LATEST_NAME = "latest"
WRITER_NAME = "writer.json"  # on a mirror
PARTS_DIR = "parts"  # on a mirror
HEALTH_DIR = "health"  # on a mirror
PINS_DIR = "pins"  # on a mirror

NO_TIME = "19700101T000000Z"  # in the name of a snapshot's directory that has no time

MAX_STEP = 10**18 - 1

Role = Literal[
    "meta",
    "model",
    "optim",
    "extra",
    "tensors",
    "dcp",
    "emergency",
    "part",
    "tmp",
    "latest",
    "writer",
    "control",
    "legacy_dcp",
    "legacy_extra",
    "legacy_meta",
    "legacy_extra_state",
]

_STEP = r"(?P<step>[0-9]{6}|[1-9][0-9]{6,17})"
_TAG = r"(?:-(?P<tag>[0-9a-f]{8}))?"
_RANK = r"_rank(?P<rank>0|[1-9][0-9]{0,8})"
_UTC = r"(?P<utc>[0-9]{8}T[0-9]{6}Z)"
_PART = r"\.part(?P<part>[0-9]{5}|[1-9][0-9]{5,8})-of-(?P<parts>[0-9]{5}|[1-9][0-9]{5,8})"

_SOURCES: tuple[tuple[Role, str], ...] = (
    ("meta", rf"meta_{_STEP}{_TAG}\.json"),
    ("model", rf"model_{_STEP}{_TAG}\.pt"),
    ("optim", rf"optim_{_STEP}{_TAG}{_RANK}\.pt"),
    ("extra", rf"extra_{_STEP}{_TAG}{_RANK}\.pt"),
    ("tensors", rf"tensors_{_STEP}{_TAG}{_RANK}\.json"),
    ("dcp", rf"dcp_{_STEP}{_TAG}"),
    ("emergency", rf"emergency_step_{_STEP}{_TAG}_{_UTC}"),
    ("part", rf"parts/meta_{_STEP}-(?P<tag>[0-9a-f]{{8}}){_PART}\.json"),
    ("latest", r"latest"),
    ("writer", r"writer\.json"),
    ("control", r"\.ckptmirror"),
    ("legacy_dcp", rf"dist_ckpt_{_STEP}"),
    ("legacy_extra", rf"extra_{_STEP}\.pt"),
    ("legacy_meta", r"meta\.json"),
    ("legacy_extra_state", r"extra_state\.pt"),
)
_PATTERNS = tuple((role, re.compile(source, re.ASCII)) for role, source in _SOURCES)
_TMP = re.compile(r"(?P<final>.+)\.(?P<save>[0-9a-f]{8})\.tmp", re.ASCII)
_DIVERGED = re.compile(rf"{HEALTH_DIR}/([0-9a-f]{{32}})\.diverged", re.ASCII)
_TAG_ONLY = re.compile(r"[0-9a-f]{8}", re.ASCII)
_SAVE_ID_START = re.compile(r"[0-9a-f]{8,}", re.ASCII)
_UTC_ONLY = re.compile(_UTC, re.ASCII)
_TYPED_STEP = re.compile(r"[0-9]{1,18}", re.ASCII)
_EMERGENCY_META = re.compile(r"meta_rank(0|[1-9][0-9]{0,8})\.json", re.ASCII)
_OF_A_RANK = re.compile(rf"rank(?:0|[1-9][0-9]{{0,8}})\.pt|tensors{_RANK}\.json|{_EMERGENCY_META.pattern}", re.ASCII)
_ARTIFACT_FILES: frozenset[Role] = frozenset({"model", "optim", "extra", "tensors"})
_ARTIFACT_DIRS: frozenset[Role] = frozenset({"dcp", "emergency"})
_TAGGABLE: frozenset[Role] = frozenset({"meta", *_ARTIFACT_FILES, *_ARTIFACT_DIRS})
_NEVER_WRITTEN: frozenset[Role] = frozenset({"legacy_dcp", "legacy_extra", "legacy_meta", "legacy_extra_state"})


@dataclass(frozen=True, slots=True)
class SaveName:
    """The names of one save at the top of the root.

    Attributes:
        step: From 0 to ``MAX_STEP``.
        tag: "" or the first eight hex digits of the save id.
    """

    step: int
    tag: str = ""

    def __post_init__(self) -> None:
        _check_step(self.step)
        if self.tag:
            _check_tag(self.tag)

    @property
    def stem(self) -> str:
        """``000200`` or ``000200-1f0c9a2e``."""
        return f"{self.step:06d}-{self.tag}" if self.tag else f"{self.step:06d}"

    @property
    def meta(self) -> str:
        """``meta_000200.json``."""
        return f"meta_{self.stem}.json"

    @property
    def model(self) -> str:
        """``model_000200.pt``."""
        return f"model_{self.stem}.pt"

    @property
    def dcp_dir(self) -> str:
        """``dcp_000200``."""
        return f"dcp_{self.stem}"

    def optim(self, rank: int) -> str:
        """``optim_000200_rank3.pt``."""
        return f"optim_{self.stem}_rank{_checked_number('rank', rank)}.pt"

    def extra(self, rank: int) -> str:
        """``extra_000200_rank3.pt``."""
        return f"extra_{self.stem}_rank{_checked_number('rank', rank)}.pt"

    def tensors(self, rank: int) -> str:
        """``tensors_000200_rank3.json``."""
        return f"tensors_{self.stem}_rank{_checked_number('rank', rank)}.json"


@dataclass(frozen=True, slots=True)
class ParsedName:
    """A parsed name.

    Attributes:
        role: What the name is for.
        step: None if the name has none. A temporary has the step of its final name.
        tag: "" or eight hex digits. A part always has the save's digits, a temporary the tag of its final name.
        rank: Global rank, if the name has one.
        utc: The time in an emergency directory's name, ``20261121T131500Z``; for people only.
        part: From 1 to ``parts``.
        final: For a temporary: its final name.
        save: For a temporary: the first eight digits of the save id (or attempt id) that wrote it.
    """

    role: Role
    step: int | None = None
    tag: str = ""
    rank: int | None = None
    utc: str = ""
    part: int = 0
    parts: int = 0
    final: str = ""
    save: str = ""


@dataclass(frozen=True, slots=True)
class ArtifactPath:
    """An artifact's path, taken apart.

    Attributes:
        top: The name directly below the root; role ``model optim extra tensors dcp emergency``.
        below: The path inside the directory; "" for a file.
    """

    top: ParsedName
    below: str = ""


def part_name(step: int, save_id: str, part: int, parts: int) -> str:
    """Return ``parts/meta_000200-1f0c9a2e.part00001-of-00002.json``; ``part`` counts from 1."""
    _checked_number("parts", parts)
    if not 1 <= _checked_number("part", part) <= parts:
        raise UsageError(f"Part {part} of {parts} does not exist: parts count from 1.")
    return f"{parts_prefix(step, save_id)}{part:05d}-of-{parts:05d}.json"


def diverged_name(attempt: str) -> str:
    """Return ``health/<attempt id>.diverged``: an object that says of an attempt that its loss was not finite."""
    return f"{HEALTH_DIR}/{attempt}.diverged"


def diverged_attempt(name: str) -> str | None:
    """Return the id of the attempt of which an object says that; None if it is another object."""
    match = _DIVERGED.fullmatch(name)
    return match[1] if match is not None else None


def parts_prefix(step: int, save_id: str) -> str:
    """Return ``parts/meta_000200-1f0c9a2e.part``, with which the names of all parts of a save begin."""
    return f"{parts_of_step(step)}{_save_digits(save_id)}.part"


def parts_of_step(step: int) -> str:
    """Return ``parts/meta_000200-``, with which the names of all parts of saves of a step begin."""
    _check_step(step)
    return f"{PARTS_DIR}/meta_{step:06d}-"


def emergency_dir_name(step: int, utc: str, tag: str = "") -> str:
    """Return ``emergency_step_000200_20261121T131500Z`` for a time given as ``20261121T131500Z``."""
    if not _UTC_ONLY.fullmatch(utc):
        raise UsageError(f"{utc!r} is not a UTC time of the form 20261121T131500Z.")
    return f"emergency_step_{SaveName(step, tag).stem}_{utc}"


def emergency_meta_name(rank: int) -> str:
    """Return ``meta_rank3.json``: one rank's meta, inside its emergency directory."""
    return f"meta_rank{_checked_number('rank', rank)}.json"


def emergency_files(rank: int) -> tuple[str, str]:
    """Return ``rank3.pt`` and ``tensors_rank3.json``: one rank's files, inside its emergency directory."""
    _checked_number("rank", rank)
    return f"rank{rank}.pt", f"tensors_rank{rank}.json"


def is_of_a_rank(name: str) -> bool:
    """Whether a rank writes a file of this name into an emergency directory, also under its temporary name."""
    match = _TMP.fullmatch(name)
    return _OF_A_RANK.fullmatch(name if match is None else match["final"]) is not None


def pp_dir(stage: int) -> str:
    """Return ``pp0/``: the directory of one pipeline stage, inside a DCP directory."""
    return f"pp{_checked_number('stage', stage)}/"


def tmp_name(final: str, save_id: str) -> str:
    """Return the temporary of ``final`` (a name or a path), in the same directory."""
    if not final or final.endswith("/"):
        raise UsageError(f"{final!r} is not the name of a file or directory.")
    return f"{final}.{_save_digits(save_id)}.tmp"


def is_tmp_name(name: str) -> bool:
    """Whether the last component of ``name`` has the form of a temporary.

    At the top of a root use :func:`parse_name`, which also checks that the final name is one that ckptmirror writes.
    """
    return _TMP.fullmatch(name.rpartition("/")[2]) is not None


def parse_name(name: str) -> ParsedName | None:
    """Parse one component at the top of a root or mirror, or a name in ``parts/``; None if it is foreign.

    A temporary is foreign unless its final name is one that ckptmirror writes.
    """
    match = _TMP.fullmatch(name)
    if match is None:
        return _parse_final(name)
    final = _parse_final(match["final"])
    if final is None or final.role in _NEVER_WRITTEN:
        return None
    return replace(final, role="tmp", final=match["final"], save=match["save"])


def plain_steps(listed: Iterable[str]) -> frozenset[int]:
    """Return the steps of which a name without a tag is among the names or paths of a place.

    A save whose step is among them takes names with its tag. If it took a plain name that is free, since a save of that
    step lost the file, then that save would seem to have it.
    """
    tops = map(parse_name, {name.partition("/")[0] for name in listed})
    return frozenset(one.step for one in tops if one and one.step is not None and not one.tag and one.role != "tmp")


def build_name(parsed: ParsedName) -> str:
    """Return the name that parses as ``parsed``."""
    role, fixed = parsed.role, {"latest": LATEST_NAME, "writer": WRITER_NAME, "control": CONTROL_DIR}
    fixed |= {"legacy_meta": "meta.json", "legacy_extra_state": "extra_state.pt"}
    if role == "tmp":
        return tmp_name(parsed.final, parsed.save)
    if role in fixed:
        return fixed[role]
    step = -1 if parsed.step is None else parsed.step
    if role == "part":
        return part_name(step, parsed.tag, parsed.part, parsed.parts)
    if role == "emergency":
        return emergency_dir_name(step, parsed.utc, parsed.tag)
    name = SaveName(step, parsed.tag)
    rank = -1 if parsed.rank is None else parsed.rank
    if role in ("optim", "extra", "tensors"):
        return {"optim": name.optim, "extra": name.extra, "tensors": name.tensors}[role](rank)
    if role in ("legacy_dcp", "legacy_extra"):
        return f"dist_ckpt_{name.stem}" if role == "legacy_dcp" else f"extra_{name.stem}.pt"
    return {"meta": name.meta, "model": name.model, "dcp": name.dcp_dir}[role]


def parse_artifact_path(path: str) -> ArtifactPath | None:
    """Parse an artifact's path; None if no save may name it.

    A file has one component. Inside a DCP or emergency directory any safe path is allowed, except temporaries and, in
    an emergency directory, the metas.
    """
    top, slash, below = path.partition("/")
    parsed = parse_name(top)
    if parsed is None:
        return None
    if not slash:
        return ArtifactPath(parsed) if parsed.role in _ARTIFACT_FILES else None
    if parsed.role not in _ARTIFACT_DIRS or not below or any(part.endswith(".tmp") for part in below.split("/")):
        return None
    if parsed.role == "emergency" and _EMERGENCY_META.fullmatch(below):
        return None
    return ArtifactPath(parsed, below)


def tagged(path: str, save_id: str) -> str:
    """Return ``path`` (of a meta or an artifact) with the tag of ``save_id`` after its step.

    Raises:
        UsageError: The path has no valid step, or has another save's tag.
    """
    return _with_tag(path, _save_digits(save_id))


def untagged(path: str) -> str:
    """Return ``path`` (of a meta or an artifact) without its tag.

    Raises:
        UsageError: The path has no valid step.
    """
    return _with_tag(path, "")


def plain(path: str) -> str:
    """Return ``path`` (of an artifact) as every node can name it: without a tag, and without a snapshot's time."""
    top, slash, below = untagged(path).partition("/")
    parsed = parse_name(top)
    if parsed is not None and parsed.role == "emergency" and parsed.step is not None:
        top = emergency_dir_name(parsed.step, NO_TIME)
    return top + slash + below


def parse_step(text: str) -> int:
    """Parse a step as a person types it: ``200`` or ``000200``.

    Raises:
        UsageError: It is anything else.
    """
    if not _TYPED_STEP.fullmatch(text):
        raise UsageError(f"{text!r} is not a step.", hint="Give a step as digits, such as 200 or 000200.")
    return int(text)


def _parse_final(name: str) -> ParsedName | None:
    for role, pattern in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            return _from_groups(role, match.groupdict())
    return None


def _from_groups(role: Role, groups: dict[str, str | None]) -> ParsedName | None:
    parsed = ParsedName(
        role=role,
        step=_int_or_none(groups.get("step")),
        tag=groups.get("tag") or "",
        rank=_int_or_none(groups.get("rank")),
        utc=groups.get("utc") or "",
        part=_int_or_none(groups.get("part")) or 0,
        parts=_int_or_none(groups.get("parts")) or 0,
    )
    if role == "part" and not 1 <= parsed.part <= parsed.parts:
        return None
    return parsed


def _int_or_none(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _with_tag(path: str, tag: str) -> str:
    top, slash, below = path.partition("/")
    parsed = parse_name(top)
    if parsed is None or parsed.role not in _TAGGABLE:
        raise UsageError(f"{path!r} is not a name of a save.")
    if tag and parsed.tag not in ("", tag):
        raise UsageError(f"{path!r} carries the tag of a save other than {tag}.")
    return build_name(replace(parsed, tag=tag)) + slash + below


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(f"{step!r} is not a step.", hint="A step is an integer of at least 0.")


def _check_tag(tag: str) -> None:
    if not _TAG_ONLY.fullmatch(tag):
        raise UsageError(f"{tag!r} is not a tag: eight lower-case hex digits.")


def _save_digits(save_id: str) -> str:
    if not _SAVE_ID_START.fullmatch(save_id):
        raise UsageError(f"{save_id!r} is not a save id: lower-case hex digits.")
    return save_id[:8]


def _checked_number(what: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 10**9:
        raise UsageError(f"{number!r} is not a {what}.")
    return number
