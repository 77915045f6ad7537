"""What is left of a save that lost files: all but some parts of the state, which a person may give up.

Rules:
* The optimizer's file of kind ``model`` has the optimizer; the extra file has everything but model and optimizer.
* Nothing is given up but what ``exclude`` names. If one rank's file of a part is lost, those of all ranks are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptmirror.core.model import Artifact, Meta
from ckptmirror.core.tensor_lists import is_list

__all__ = ["EXTRA_PARTS", "how_to_go_on", "how_to_load", "parts_lost", "without_parts"]

EXTRA_PARTS = ("scheduler", "scaler", "ema", "dataloader", "extra", "rng")
_PARTS_OF = {"optim": ("optimizer",), "extra": EXTRA_PARTS}


def without_parts(meta: Meta, damaged: Collection[Artifact], exclude: Collection[str]) -> Meta:
    """Return what a load that leaves out the parts in ``exclude`` can take of a damaged save; maybe no kind at all."""
    roles = {_role(one) for one in damaged}
    given_up = {role for role, parts in _PARTS_OF.items() if role in roles and set(parts) <= set(exclude)}
    left_out = [one for one in damaged if is_list(one.path) or _role(one) in given_up]
    kinds = meta.kinds_without(one for one in damaged if one not in left_out)
    if kinds == ("emergency",):
        return meta.narrowed(())  # it has its own rules
    paths = {one.path for one in (*left_out, *(one for one in meta.artifacts if _role(one) in given_up))}
    return meta.narrowed(kinds, paths)


def parts_lost(meta: Meta, damaged: Sequence[Artifact]) -> tuple[str, ...]:
    """Return the fewest parts without which a damaged save can be loaded; none if that takes no part, or is no way."""
    ways = [(), *_PARTS_OF.values(), tuple(part for parts in _PARTS_OF.values() for part in parts)]
    found = next((parts for parts in ways if without_parts(meta, damaged, parts).kinds), None)
    return found or ()


def how_to_go_on(meta: Meta, parts: Sequence[str]) -> str:
    """Say with which arguments of ``resume`` a person continues from a save without these parts; "" if there are none.

    A node's part of a save, and a copy of a mirror's, are never continued from in this way.
    """
    if not parts or not meta.is_whole or meta.staged_from is not None:
        return ""
    way = f"policy={meta.save_id[:8]!r}, {_exclude(parts)}"
    return f"; resume with {way} continues from it without the lost part"


def how_to_load(meta: Meta, parts: Sequence[str]) -> str:
    """Say with which call a person loads a save without these parts; "" if there are none."""
    return f"manager.load(state, PATH, {_exclude(parts)}) takes the rest." if parts and meta.is_whole else ""


def _exclude(parts: Sequence[str]) -> str:
    listed = ", ".join(f'"{part}"' for part in parts) + ("," if len(parts) == 1 else "")
    return f"exclude=({listed})"


def _role(artifact: Artifact) -> str:
    return artifact.path.rpartition("/")[2].partition("_")[0]
