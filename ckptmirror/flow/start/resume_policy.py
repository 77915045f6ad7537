"""Policy: the ``policy=`` argument of ``CheckpointManager.resume``, which says where a start should begin.

Rules:
* A path goes through the one function that resolves references. It must name a save of this root, since a run continues
  only from its own saves, wherever their bytes come from.
* A path that names a kind keeps it (I4); a meta or a root leaves the kind open.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckptmirror.core import names
from ckptmirror.core.errors import UsageError
from ckptmirror.core.model import Kind
from ckptmirror.flow.places.reference import CheckpointReference, locate

__all__ = ["Policy", "policy_text", "settled_policy"]

Policy = str | int | Path | CheckpointReference


def policy_text(root: Path, policy: Policy) -> str:
    """Return the policy as a text that is equal on all nodes, each with its own root, if they ask for the same."""
    if isinstance(policy, CheckpointReference):
        return f"save {policy.save_id}"
    if isinstance(policy, Path) or (isinstance(policy, str) and "/" in policy):
        parsed = names.parse_name(Path(policy).name)
        if parsed is None or parsed.step is None:
            return os.path.relpath(policy, root)
        return f"a path of step {parsed.step}, {parsed.role}"  # each node may tag its own names
    return str(policy)


def settled_policy(root: Path, policy: Policy) -> tuple[str | int, Kind | None]:
    """Return the policy as a word, a step or a save id, and the kind that it asks for.

    Raises:
        CheckpointNotFound: The path names nothing.
        UsageError: It is no policy, or names a legacy checkpoint or a checkpoint outside this root.
    """
    if not _is_policy(policy):
        raise UsageError(
            f"policy={policy!r} is not a policy.",
            hint='Give "auto", "latest", "scratch", a step, a save id, or the path of a save in the root.',
        )
    if isinstance(policy, int) or (isinstance(policy, str) and "/" not in policy):
        return policy, None
    from ckptmirror.flow.places.legacy_references import ADOPT_HINT
    from ckptmirror.flow.places.resolve import resolve_checkpoint_reference

    found = resolve_checkpoint_reference(policy)
    if found.save_id is None:
        raise UsageError(f"{found.path} is a legacy checkpoint, which is on no lineage.", hint=ADOPT_HINT)
    if not isinstance(found.dir, Path) or not _is_same(found.dir, root):
        raise UsageError(
            f"{policy} is not in {root}.",
            hint="To go back, give its step or its save id: the copy is fetched from a mirror. To take over another "
            "run's values call manager.load(state, reference=...) after resume.",
        )
    if isinstance(policy, CheckpointReference):
        return found.save_id, found.kind
    parsed = locate(policy).parsed
    return found.save_id, found.kind if parsed is not None and parsed.role != "meta" else None


def _is_policy(given: object) -> bool:
    if isinstance(given, int):
        return not isinstance(given, bool) and given >= 0
    return isinstance(given, (str, Path, CheckpointReference))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
