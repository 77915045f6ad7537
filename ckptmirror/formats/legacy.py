"""Legacy checkpoints: loads what a plain DCP save or ``torch.save`` wrote into live objects.

Rules:
* The same safe loaders read them as our own files. What a loader refuses makes the load fail: nothing is skipped
  silently.
* Keys identify the parts: ``model``, optimizers (``legacy_optimizers``); everything else is extra state. A tree that
  holds only tensors is a model. A single entry around everything (``{"app": {...}}``) is unwrapped.
* Every rank reads the whole checkpoint into host memory and takes its piece of each tensor.
* Extra state was written once for all ranks. Random generators are not restored: no record says which rank they are of.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError, UnsafePickle, UsageError
from ckptmirror.core.model import Kind
from ckptmirror.core.per_rank import RankExtras
from ckptmirror.formats.base import LoadReport, LoadTarget, Missing
from ckptmirror.formats.capture import HAS_OPTIMIZER
from ckptmirror.formats.dcp_read import read_tree
from ckptmirror.formats.legacy_optimizers import Group, find_optimizer, groups_of, is_optimizer_key, joined
from ckptmirror.formats.load_model import plan_model
from ckptmirror.formats.load_parts import load_parts
from ckptmirror.formats.rank_files import RankFiles, moved
from ckptmirror.formats.sidecars import load_extra
from ckptmirror.formats.versions import Versions, plain_model
from ckptmirror.formats.weights_only_values import decode
from ckptmirror.untrusted.tensor_files import load_pt

__all__ = ["LegacyState", "load_legacy", "read_legacy"]

_log = logging.getLogger("ckptmirror.legacy")
_MODEL = "model"
# The keys under which legacy writers kept the parts of a TrainState.
_PART_OF = {
    "scheduler": "scheduler",
    "lr_scheduler": "scheduler",
    "scaler": "scaler",
    "grad_scaler": "scaler",
    "ema": "ema",
    "dataloader": "dataloader",
    "extra": "extra",
}
_RNG_KEYS = frozenset({"rng", "rng_state", "rng_states", "torch_rng_state", "numpy_rng_state", "python_rng_state"})
_WITHOUT_EXTRA = (
    "If you trust it, allow its types by torch.serialization.add_safe_globals. To go without it move the file away, or "
    "load with every part but model and optimizer left out (exclude)."
)
_COUNTERS = frozenset({"step", "global_step"})


@dataclass(frozen=True)
class LegacyState:
    """The contents of a legacy checkpoint.

    Attributes:
        model: Full tensors by name.
        versions: The layout versions of its modules, if it has them.
        optimizers: The groups of optimizer keys, in order.
        extra: Everything else, from the tensors' own file and the file beside it.
    """

    model: dict[str, Any]
    versions: Versions | None = None
    optimizers: list[Group] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """All groups joined by the names and positions that they carry; None if there are none."""
        return joined(self.optimizers)


def read_legacy(path: Path, kind: Kind, extra: Path | None, map_location: str = "cpu") -> LegacyState:
    """Read a whole legacy checkpoint.

    Args:
        path: The DCP directory or the model file.
        kind: Which of the two it is.
        extra: The file of extra state, if there is one.
        map_location: Device of the tensors.

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        UsageError: Its layout is unknown.
    """
    tree = read_tree(path) if kind == "dcp" else moved(decode(load_pt(path)), map_location)
    state = _sorted_out(tree, path)
    if extra is not None:
        try:
            beside = moved(decode(load_pt(extra)), map_location)
        except UnsafePickle as error:
            raise UnsafePickle(error.message, hint=_WITHOUT_EXTRA) from error
        if not isinstance(beside, Mapping):
            raise IntegrityError(f"{extra} holds a {type(beside).__name__}, not a dict.")
        if twice := sorted(str(key) for key in beside if key in state.extra and key not in _COUNTERS):
            _log.warning("%s and %s both hold %s: the values in %s are used", path, extra, ", ".join(twice), extra.name)
        state.extra.update({str(key): value for key, value in beside.items()})
    return state


def _sorted_out(tree: Any, path: Path) -> LegacyState:
    if isinstance(tree, Mapping) and len(tree) == 1:
        (inner,) = tree.values()
        if isinstance(inner, Mapping) and isinstance(inner.get(_MODEL), Mapping):
            tree = inner
    if not isinstance(tree, Mapping):
        raise UsageError(f"{path} holds a {type(tree).__name__}, not a dict.")
    if isinstance(tree.get(_MODEL), Mapping):
        model = tree[_MODEL]
    elif tree and all(isinstance(value, torch.Tensor) for value in tree.values()):
        return LegacyState(*plain_model(tree, str(path)))
    else:
        there = ", ".join(map(str, list(tree)[:8])) or "nothing"
        raise UsageError(f'{path} holds no "{_MODEL}"; it holds {there}.', hint="Read it with torch.")
    rest = {str(key): value for key, value in tree.items() if key != _MODEL}
    extra = {key: value for key, value in rest.items() if not is_optimizer_key(key)}
    return LegacyState(*plain_model(model, str(path)), groups_of(rest), extra)


def load_legacy(found: LegacyState, path: Path, target: LoadTarget, step: int) -> LoadReport:
    """Load a legacy checkpoint, and report what it lacks.

    Everything is compared before the first live tensor is written. If it is uncertain which optimizer state belongs
    to which parameter, the optimizer starts without history, and the report says so.

    Raises:
        UsageError: The model does not fit, or an object does not take its state.
    """
    state = target.state
    extra, unused = _by_part(found.extra, state)
    left, missing = Missing(), Missing()

    def optimizer() -> Mapping[str, Any] | str:
        saved, lines = find_optimizer(found.optimizers, found.model, state)
        for line in lines:
            left.say(f"optimizer: {line}")
        return saved

    parts = load_parts(
        target,
        model=lambda _: plan_model(
            state.model, found.model, versions=found.versions, rules=target.rules, say=target.left.say
        ),
        optimizer=optimizer if found.optimizers else None,
        extra=RankExtras(extra, target.world_size),
    )
    source = RankFiles({0: path}, 0, trees={0: {"step": step, **extra, HAS_OPTIMIZER: "optimizer" in parts.loaded}})
    rest = load_extra(source, replace(target, exclude=target.exclude | {"rng"}), step)
    if "rng" not in target.exclude:
        missing.lacks("rng", "random generators of each rank; they stay as they are")
    for key in unused if "extra" not in target.exclude else ():
        missing.unused(key)
    return LoadReport(missing=tuple(left)) + parts + rest + LoadReport(missing=tuple(missing))


def _by_part(extra: Mapping[str, Any], state: Any) -> tuple[dict[str, Any], list[str]]:
    """Return extra state under the names of a ``TrainState``, and the keys that nothing here takes."""
    parts: dict[str, Any] = {}
    own: dict[str, Any] = {}
    unused: list[str] = []
    for key, value in extra.items():
        name = _PART_OF.get(key)
        if name is not None and name not in parts:
            parts[name] = value
        elif state.extra is not None and key in state.extra:
            own[key] = value
        elif key not in _RNG_KEYS | _COUNTERS:
            unused.append(key)
    if own:
        parts["extra"] = {**(parts["extra"] if isinstance(parts.get("extra"), Mapping) else {}), **own}
    return parts, unused
