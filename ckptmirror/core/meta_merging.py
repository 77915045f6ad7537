"""One meta from several: the parts of all nodes, or the metas that the ranks left in an emergency directory.

Rules:
* The result depends only on the inputs, in any order: two nodes that merge write the same bytes.
* Every input must be of the same save. What describes the run rather than the files (training config, metrics, fields,
  time) comes from the lowest node.
* Each node chooses the tag of its names by itself, so merged paths have no tag, and ``object`` names each object.
* What is merged is a node's or a rank's own: a copy may lack files, and the merged meta would not say so.
* Every node has the coordinator's ``.metadata``: a path may come several times, but only with the same digest. Where
  only some nodes signed, the one with hashes stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptmirror.core import names
from ckptmirror.core.errors import BrokenMeta
from ckptmirror.core.model import ALL_NODES, KINDS, Artifact, Kind, Meta
from ckptmirror.core.names import untagged

__all__ = ["check_same_save", "is_on_all_nodes", "merge_copies", "merge_emergency", "merge_parts", "plain"]

_SAME = ("run_id", "attempt", "step", "save_id", "save_number", "kinds", "world_size", "nodes")


def merge_parts(parts: Sequence[Meta]) -> Meta:
    """Merge the parts of all nodes of one save.

    Raises:
        BrokenMeta: The parts are not exactly one of each node, or contradict one another.
    """
    ordered = sorted(parts, key=lambda part: part.node)
    check_same_save(ordered)
    if copies := [part for part in ordered if part.staged_from is not None]:
        raise BrokenMeta(f"The part of node {copies[0].node} is a copy, which may lack files.")
    first = ordered[0]
    if len(ordered) != first.nodes or any(part.node != node for node, part in enumerate(ordered)):
        nodes = ", ".join(str(part.node) for part in ordered)
        raise BrokenMeta(f"The parts are of the nodes {nodes}; the save has {first.nodes} nodes, counted from 0.")
    if first.nodes == 1:
        return first
    return replace(first, node=ALL_NODES, tag="", artifacts=_merged_artifacts(ordered))


def plain(meta: Meta) -> Meta:
    """Return the meta of a whole save with its files under their plain names, as on no disk in particular."""
    artifacts = tuple(replace(one, path=names.plain(one.path)) for one in _merged_artifacts([meta]))
    return replace(meta, tag="", artifacts=artifacts, staged_from=None)


def is_on_all_nodes(meta: Meta, path: str) -> bool:
    """Whether every node of a save has this file: the coordinator's ``.metadata``. A copy may stand in for a part."""
    return meta.nodes > 1 and path.rpartition("/")[2] == ".metadata"


def merge_copies(one: Meta, other: Meta) -> Meta:
    """Merge what two disks have of one save, each perhaps of some kinds only, under plain names."""
    found: dict[str, Artifact] = {}
    for artifact in (*plain(one).artifacts, *plain(other).artifacts):
        before = found.setdefault(artifact.path, artifact)
        if before.digest.agrees_with(artifact.digest):
            found[artifact.path] = replace(before, kinds=_all_kinds(before.kinds, artifact.kinds))
    artifacts = tuple(found[path] for path in sorted(found))
    return replace(plain(one), kinds=_all_kinds(one.kinds, other.kinds), artifacts=artifacts)


def _all_kinds(*of: Sequence[Kind]) -> tuple[Kind, ...]:
    return tuple(kind for kind in KINDS if any(kind in kinds for kinds in of))


def merge_emergency(metas: Sequence[Meta]) -> Meta:
    """Merge the metas that ranks wrote for one emergency snapshot, on one node or several.

    The grace period may end before every rank has written: those that have not are not among the artifacts.

    Raises:
        BrokenMeta: The metas are not of one emergency save, or contradict one another.
    """
    ordered = sorted(metas, key=lambda meta: (meta.node, [artifact.path for artifact in meta.artifacts]))
    check_same_save(ordered)
    if copies := [meta for meta in ordered if meta.staged_from is not None]:
        raise BrokenMeta(f"A meta of node {copies[0].node} is that of a copy, and snapshots are not staged.")
    first = ordered[0]
    if first.kinds != ("emergency",):
        raise BrokenMeta(f"kinds is {', '.join(first.kinds)}, not emergency.")
    node = first.node if len({meta.node for meta in ordered}) == 1 else ALL_NODES
    if len({meta.tag for meta in ordered}) == 1:
        return replace(first, node=node, artifacts=_merged_artifacts(ordered, keep_paths=True))
    return replace(first, node=node, tag="", artifacts=_merged_artifacts(ordered))


def check_same_save(metas: Sequence[Meta]) -> None:
    """Check that metas are of one save.

    Raises:
        BrokenMeta: They are not; the message names what differs.
    """
    if not metas:
        raise BrokenMeta("There is nothing to merge.")
    for meta in metas[1:]:
        for name in _SAME:
            if getattr(meta, name) != getattr(metas[0], name):
                raise BrokenMeta(f"{name} differs between the parts of nodes {metas[0].node} and {meta.node}.")


def _merged_artifacts(metas: Sequence[Meta], *, keep_paths: bool = False) -> tuple[Artifact, ...]:
    merged: dict[str, Artifact] = {}
    for meta in metas:
        for artifact in meta.artifacts:
            path = artifact.path if keep_paths else untagged(artifact.path)
            stored = artifact.object_name
            moved = replace(artifact, path=path, object=None if stored == path else stored)
            earlier = merged.setdefault(path, moved)
            if earlier.digest.hashes == () and earlier.digest.agrees_with(artifact.digest):
                merged[path] = replace(earlier, digest=artifact.digest)
            elif not earlier.digest.agrees_with(artifact.digest):
                raise BrokenMeta(f"Two nodes wrote {path[:80]!a} with different bytes.")
    return tuple(merged[path] for path in sorted(merged))
