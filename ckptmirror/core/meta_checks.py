"""Checks that the fields of a meta, each well formed, are consistent with each other.

Rules:
* An artifact's path must parse as a name of this meta's step and tag, so a hostile meta cannot name ``attempts.json``
  or another save's files. An object's name differs from the path at most by this save's tag.
* Paths are unique even if case and Unicode form are ignored, since on some file systems two such paths would overwrite
  each other; ckptmirror writes no such paths. No path is a directory of another.
* An emergency meta names files of one emergency directory, and nothing else.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import KINDS, Artifact, Meta
from ckptmirror.core.names import ArtifactPath, check_relative_path, parse_artifact_path, untagged

__all__ = ["check_meta"]


def check_meta(meta: Meta) -> None:
    """Check that the fields of a meta, each well formed, are consistent with each other.

    Raises:
        BrokenMeta: They are not; the message names the field and the reason.
    """
    if meta.tag not in ("", meta.save_id[:8]):
        raise BrokenMeta("tag is not that of save_id.")
    if not meta.attempt.decided:
        raise BrokenMeta("attempt.decided is false, but an undecided attempt saves nothing.")
    if meta.nodes > meta.world_size:
        raise BrokenMeta(f"nodes is {meta.nodes}, more than world_size, {meta.world_size}.")
    if meta.partial and meta.staged_from is None:
        raise BrokenMeta("partial is true, but only a staged copy lacks files.")
    if "emergency" in meta.kinds and len(meta.kinds) > 1:
        raise BrokenMeta("kinds mixes emergency with others.")
    for index, artifact in enumerate(meta.artifacts):
        _check_artifact(meta, artifact, f"artifacts[{index}]")
    _check_names_apart("path", [artifact.path for artifact in meta.artifacts])
    _check_names_apart("object", [artifact.object_name for artifact in meta.artifacts])
    emergency_dirs = {artifact.path.partition("/")[0] for artifact in meta.artifacts if "emergency" in artifact.kinds}
    if len(emergency_dirs) > 1:
        raise BrokenMeta("artifacts are in more than one emergency directory.")


def _check_artifact(meta: Meta, artifact: Artifact, where: str) -> None:
    parsed = _own_name(artifact.path, f"{where}.path", meta.step)
    if parsed.top.tag != meta.tag:
        raise BrokenMeta(f"{where}.path has the tag {parsed.top.tag!r}, the meta has {meta.tag!r}.")
    if artifact.object is not None:
        stored = _own_name(artifact.object, f"{where}.object", meta.step)
        if stored.top.tag not in ("", meta.save_id[:8]) or untagged(artifact.object) != untagged(artifact.path):
            raise BrokenMeta(f"{where}.object is not a name of this artifact: {artifact.object[:80]!a}.")
    if not set(artifact.kinds) <= set(meta.kinds):
        raise BrokenMeta(f"{where}.kinds has a kind that the meta does not have.")
    role = parsed.top.role
    if (role in KINDS and role not in artifact.kinds) or (role != "emergency" and "emergency" in artifact.kinds):
        raise BrokenMeta(f"{where}.kinds does not fit its path.")


def _own_name(path: str, where: str, step: int) -> ArtifactPath:
    try:
        check_relative_path(path)
    except BrokenMeta as error:
        raise BrokenMeta(f"{where}: {error.message}") from error
    parsed = parse_artifact_path(path)
    if parsed is None:
        raise BrokenMeta(f"{where} is not the name of an artifact: {path[:80]!a}.")
    if parsed.top.step != step:
        raise BrokenMeta(f"{where} is of step {parsed.top.step}, the meta of step {step}.")
    return parsed


def _check_names_apart(what: str, paths: Sequence[str]) -> None:
    folded = {_folded(path): path for path in paths}
    if len(folded) != len(paths):
        seen: set[str] = set()
        for path in paths:
            if _folded(path) in seen:
                raise BrokenMeta(
                    f"artifacts: the {what} {path[:80]!a} appears twice (case and Unicode form do not count)."
                )
            seen.add(_folded(path))
    for name, path in folded.items():
        slash = name.rfind("/")
        while slash > 0:
            if name[:slash] in folded:
                raise BrokenMeta(
                    f"artifacts: the {what} {folded[name[:slash]][:80]!a} is a directory of {path[:80]!a}."
                )
            slash = name.rfind("/", 0, slash)


def _folded(path: str) -> str:
    return path.lower() if path.isascii() else unicodedata.normalize("NFKC", path).casefold()
