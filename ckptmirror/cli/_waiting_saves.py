"""Saves on a mirror that wait for nodes: one sentence for people, and fields for ``--json``."""

from __future__ import annotations

from typing import Any

from ckptmirror.cli._human_text import size
from ckptmirror.core.uncommitted import NodeShare, Uncommitted

__all__ = ["waiting_facts", "waiting_text"]

_LISTED = 100  # as many absent nodes are listed with --json
_SHOWN = 8


def waiting_text(mirror: str, one: Uncommitted, this_node: str = "") -> str:
    """Return which nodes a save waits for and what of it is there.

    Args:
        mirror: The mirror's URL.
        one: The save.
        this_node: What this node has still to send of it, and the command that sends it; "" if it is done.
    """
    parts = one.parts
    there = [_share(share) for share in one.shares[:_SHOWN]]
    there += [f"{len(one.shares) - _SHOWN} more nodes"] * (len(one.shares) > _SHOWN)
    if one.other_files:
        there.append(f"{_files(one.other_files, one.other_bytes)} of nodes that are not done")
    unknown = (
        "how much is lacking, `ckptmirror status` there says, and `ckptmirror drain` there finishes it, or says why "
        f"not, if that node still has its part; or `ckptmirror push --mirror {mirror}` there if it does not use this "
        "mirror"
    )
    rest = (this_node or unknown) if parts.absent(1) else "`ckptmirror drain` on any of them does it, or says why not"
    return (
        f"step {parts.step} (save {one.save_id[:8]}) is not committed on {mirror}: {parts.nodes} nodes saved it, and "
        f"it waits for {parts.awaited}. There so far: {', '.join(there) or 'no file'}; {rest}"
    )


def waiting_facts(mirror: str, one: Uncommitted) -> dict[str, Any]:
    """Return the fields of one save that waits for nodes."""
    return {
        "mirror": mirror,
        "step": one.parts.step,
        "save_id": one.save_id,
        "nodes": one.parts.nodes,
        "absent": one.parts.absent(_LISTED),
        "parts": [
            {
                "node": share.node,
                "files": share.files,
                "size_bytes": share.size_bytes,
                "missing_files": share.missing_files,
                "missing_bytes": share.missing_bytes,
            }
            for share in one.shares
        ],
        "other_files": one.other_files,
        "other_bytes": one.other_bytes,
    }


def _share(share: NodeShare) -> str:
    missing = _files(share.missing_files, share.missing_bytes)
    lacks = f", of which {missing} disappeared" if share.missing_files else ""
    return f"node {share.node} with {_files(share.files, share.size_bytes)}{lacks}"


def _files(files: int, size_bytes: int) -> str:
    return f"{files} file{'s' if files != 1 else ''} ({size(size_bytes)})"
