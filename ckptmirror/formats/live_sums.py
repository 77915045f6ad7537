"""Fingerprints of the tensors of a state: for the lists of a save, and of the live tensors after a load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from ckptmirror.core.tensor_proof import Summed
from ckptmirror.formats.capture import walk_tensors
from ckptmirror.formats.names import live_values
from ckptmirror.formats.optimizer_state import capture_optimizer
from ckptmirror.formats.shards import local_of, piece_of
from ckptmirror.formats.state_tree import state_of
from ckptmirror.formats.tensor_bytes import has_memory, has_plain_bytes
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.versions import for_live, migrating, versions_in
from ckptmirror.formats.weights_only_values import encode
from ckptmirror.local.daemon_pool import cores
from ckptmirror.sums.fingerprints import fingerprints

__all__ = ["fingerprints_of", "live_sums", "migrated_names"]

_log = logging.getLogger("ckptmirror.formats")
_GROUPS = "optimizer.param_groups."  # their order, and so their names, may change


def fingerprints_of(tensors: Iterable[tuple[str, torch.Tensor]], *, workers: int = 1) -> list[Summed]:
    """Return each tensor that has plain bytes, or the piece of it that this rank holds, with its fingerprint.

    Nothing if a device has no memory for that, or no such operation: that is no reason to lose a save or a start.
    """
    pieces = [(name, piece_of(tensor)) for name, tensor in tensors if has_plain_bytes(tensor)]
    there = [(name, piece) for name, piece in pieces if has_memory(piece.data)]
    try:
        sums = fingerprints([(piece.data, piece.region) for _, piece in there], workers=workers)
    except RuntimeError as error:
        _log.warning("tensors have no fingerprints, so a load cannot be proved with them: %s", error)
        return []
    return [
        Summed(name, str(piece.data.dtype).removeprefix("torch."), piece.region, both)
        for (name, piece), both in zip(there, sums, strict=True)
    ]


def live_sums(state: TrainState, loaded: Collection[str]) -> list[Summed]:
    """Return what this rank holds of the loaded parts, under the names that a save gives it.

    Left out is what the user's extra holds too: it was loaded last, and brings each rank its own values.

    Args:
        state: The state.
        loaded: The names of the parts that were loaded.
    """
    parts: dict[str, Any] = {}
    if "model" in loaded:
        parts["model"] = {name: encode(value, name) for name, value in live_values(state.model).items()}
    if "optimizer" in loaded:
        parts["optimizer"] = capture_optimizer(state.model, state.optimizer)
    if "ema" in loaded:
        parts["ema"] = encode(state_of(state.ema, "ema"), "ema")
    asked = state.extra or {} if "extra" in loaded else {}
    extra = {key: state_of(value, f"extra.{key}") for key, value in asked.items()}
    elsewhere = {_memory(tensor) for _, tensor in walk_tensors(extra)} - {0}
    tensors = [(name, one) for name, one in walk_tensors(parts) if not name.startswith(_GROUPS)]
    found = fingerprints_of((one for one in tensors if _memory(one[1]) not in elsewhere), workers=cores())
    return [one for one in found if all(one.region.sizes)]


def _memory(tensor: torch.Tensor) -> int:
    """Return where a tensor's storage is; 0 if that cannot be said."""
    local = local_of(tensor)
    return local.untyped_storage().data_ptr() if has_plain_bytes(local) else 0


def migrated_names(model: torch.nn.Module, extra: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that says whether a module with another layout version may have changed a saved tensor.

    Args:
        model: The live model.
        extra: The extra state of the save.
    """
    own = live_values(model).metadata
    changes = migrating(model, own, for_live(model, own, versions_in(extra, ("model",))))
    return lambda name: name.startswith("model.") and changes(name.removeprefix("model."))
