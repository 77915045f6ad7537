"""What goes beside every kind: ``extra_*`` (all else a resume needs) and ``tensors_*`` (what was saved, to compare).

Rules:
* Each rank writes its own pair, once a save, whatever the kinds.
* Random generators and the data position belong to a rank; a rank that the save did not have keeps its own, and says
  so. All else (scheduler, scaler, EMA, the user's extra) is shared: a new rank takes rank 0's.
* A part that the save lacks is reported and logged, never passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.errors import CkptMirrorError, IntegrityError, UsageError
from ckptmirror.core.model import Artifact, Meta
from ckptmirror.core.names import SaveName
from ckptmirror.formats.artifacts import write_json, write_pt
from ckptmirror.formats.base import LoadReport, Snapshot, WriteContext
from ckptmirror.formats.capture import walk_tensors
from ckptmirror.formats.live import load_model, warn_missing
from ckptmirror.formats.rank_files import RankFiles
from ckptmirror.formats.rng import load_rng
from ckptmirror.formats.shards import cut, piece_of
from ckptmirror.formats.tensor_bytes import digest32

__all__ = ["load_extra", "load_sidecars", "tensor_list", "write_sidecars"]


def write_sidecars(snapshot: Snapshot, context: WriteContext) -> list[Artifact]:
    """Write and seal this rank's ``extra_*`` and ``tensors_*``; they belong to all kinds of the save."""
    extra, tensors = context.name.extra(context.rank), context.name.tensors(context.rank)
    listed = tensor_list(snapshot, rank=context.rank, world_size=context.world_size)
    digests = {
        extra: write_pt(cut(snapshot.extra), context.root / extra, save_id=context.save_id),
        tensors: write_json(listed, context.root / tensors, save_id=context.save_id),
    }
    return [Artifact(path=p, kinds=context.kinds, rank=context.rank, digest=digest) for p, digest in digests.items()]


def tensor_list(snapshot: Snapshot, *, rank: int, world_size: int, sums: bool = True) -> dict[str, Any]:
    """Return the content of ``tensors_*.json``: this rank's tensors: shape, dtype, place, sums of the bytes.

    ``sum32`` adds up over the pieces of a tensor (see ``formats.tensor_bytes.sum32``); ``crc32c`` is of the piece.
    Nothing else is in it, so that saves of equal tensors have equal files.
    """
    parts = {"model": snapshot.model, "optimizer": snapshot.optimizer, "ema": snapshot.extra.get("ema")}
    return {
        "format": "ckptmirror-tensors",
        "version": 1,
        "rank": rank,
        "world_size": world_size,
        "sharded": snapshot.sharded,
        "tensors": [_describe(name, tensor, sums) for name, tensor in walk_tensors(parts)],
    }


def _describe(name: str, tensor: torch.Tensor, sums: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if tensor.layout != torch.strided or tensor.is_quantized:
        return described  # no plain row of bytes to sum
    piece = piece_of(tensor)
    described |= {"offsets": list(piece.region.offsets), "sizes": list(piece.region.sizes)}
    if sums:
        described["sum32"], described["crc32c"] = digest32(piece.data.cpu())
    return described


def load_sidecars(
    root: Path,
    meta: Meta,
    state: Any,
    *,
    rank: int,
    world_size: int,  # noqa: ARG001 - the seam's signature
    exclude: frozenset[str],
) -> LoadReport:
    """Load everything but model and optimizer into ``state`` (a ``TrainState``), on any number of ranks.

    Args:
        root: Where the files of the save lie.
        meta: The save.
        state: What to load into.
        rank: This process's rank.
        world_size: Number of ranks that load.
        exclude: Parts to leave alone: "scheduler", "scaler", "ema", "dataloader", "extra", "rng".

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        UsageError: An object does not take its saved state.
    """
    name = SaveName(meta.step, meta.tag)
    named = {artifact.path for artifact in meta.artifacts}
    paths = {r: root / name.extra(r) for r in range(meta.world_size) if name.extra(r) in named}
    if not paths:
        missing = (warn_missing("extra", f"{name.extra(rank)}: nothing but model and optimizer can be loaded"),)
        return LoadReport(meta.step, (), missing)
    return load_extra(RankFiles(paths, rank), (), state, step=meta.step, own=rank in paths, exclude=exclude)


def load_extra(
    source: RankFiles, at: tuple[str, ...], state: Any, *, step: int, own: bool, exclude: frozenset[str]
) -> LoadReport:
    """Load the extra state that lies at ``at`` in the files of ``source``.

    Args:
        source: The files by rank.
        at: Keys from the top of a file to the extra state.
        state: What to load into.
        step: The step that the files must be of.
        exclude: Parts to leave alone.
        own: Whether this rank was among those of the save, so that random generators and data position are its own.
    """
    loader = _Loader(source, at, state, own, exclude)
    if (saved := loader.tree.get("step")) != step:
        raise IntegrityError(f"The extra state is of step {saved}, not {step}.")
    loader.part("scheduler", lambda: _give(state.scheduler, loader.whole("scheduler"), "scheduler"))
    loader.part("scaler", lambda: _give(state.scaler, loader.whole("scaler"), "scaler"))
    loader.part("ema", loader.ema)
    loader.part("dataloader", lambda: _give(state.dataloader, loader.whole("dataloader"), "dataloader"))
    loader.part("extra", lambda: _write_back(state.extra, loader.whole("extra"), "extra"))
    loader.rng()
    return LoadReport(step, tuple(loader.loaded), tuple(loader.missing))


class _Loader:
    def __init__(self, source: RankFiles, at: tuple[str, ...], state: Any, own: bool, exclude: frozenset[str]) -> None:
        self.source, self.at, self.state, self.own, self.exclude = source, at, state, own, exclude
        self.tree = self._tree(None)
        self.loaded: list[str] = []
        self.missing: list[str] = []

    def _tree(self, rank: int | None) -> dict[str, Any]:
        tree = self.source.tree(rank)
        for key in self.at:
            tree = tree.get(key) if isinstance(tree, dict) else None
        if not isinstance(tree, dict):
            raise IntegrityError("A file of extra state is not a dict.")
        return tree

    def part(self, name: str, load: Callable[[], None]) -> None:
        target = getattr(self.state, name)
        if target is None or name in self.exclude or (name == "dataloader" and not hasattr(target, "load_state_dict")):
            return
        if name == "dataloader" and not self.own:
            self._lacks(name, "position of this rank; it starts where it is")
        elif name == "scaler" and self.tree.get(name) == {}:
            self._lacks(name, "state, it was disabled; it starts at its default")
        elif name in self.tree or (name == "ema" and name in self._tree(0)):
            load()
            self.loaded.append(name)
        else:
            self._lacks(name, "state; it stays as it is")

    def whole(self, name: str, like: Any = None) -> Any:
        return self.source.whole((*self.at, name), like)

    def ema(self) -> None:
        ema = self.state.ema
        source = self.source if "ema" in self.tree else self.source.of(0)
        saved = source.tree()
        for key in (*self.at, "ema"):
            saved = saved[key]
        if isinstance(ema, torch.nn.Module):
            load_model(ema, saved, lambda name: source.others((*self.at, "ema", name)))
        else:
            _give(ema, source.whole((*self.at, "ema"), ema.state_dict()), "ema")

    def rng(self) -> None:
        if "rng" in self.exclude:
            return
        if not self.own:
            self._lacks("rng", "random generators of this rank; they stay as they are")
            return
        absent = load_rng(self.whole("rng"))
        self.loaded.append("rng")
        self.missing += [f"rng.{name}: the save has it, this process has not" for name in absent]

    def _lacks(self, name: str, what: str) -> None:
        self.missing.append(warn_missing(name, what))


def _give(target: Any, saved: Any, name: str) -> None:
    if isinstance(target, (list, tuple)):
        if not isinstance(saved, list) or len(saved) != len(target):
            raise UsageError(f"The save and the state have not the same number of {name}s.")
        for index, (one, value) in enumerate(zip(target, saved, strict=True)):
            _give(one, value, f"{name}[{index}]")
        return
    try:
        if isinstance(target, torch.nn.Module):
            load_model(target, saved)
        else:
            target.load_state_dict(saved)
    except CkptMirrorError:
        raise
    except Exception as error:  # an object of the user's; whatever it raises, the answer is the same
        raise UsageError(
            f"The {name} does not take its saved state: {type(error).__name__}: {error}",
            hint=f'Build it as it was, or load without it: exclude=("{name}",).',
        ) from error


def _write_back(target: dict[str, Any], saved: Mapping[str, Any], where: str) -> None:
    """Write saved values into the user's dict: objects by ``load_state_dict``, tensors in place, else as they are."""
    for key, value in saved.items():
        now = target.get(key)
        if hasattr(now, "load_state_dict"):
            _give(now, value, f"{where}.{key}")
        elif type(now) is dict and type(value) is dict:
            for old in [old for old in now if old not in value]:
                del now[old]
            _write_back(now, value, f"{where}.{key}")
        elif (
            isinstance(now, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (now.shape, now.dtype) == (value.shape, value.dtype)
        ):
            with torch.no_grad():
                now.copy_(value)
        else:
            target[key] = value
