"""Kind ``emergency``: what a rank can save by itself in its last seconds, in a separate directory.

``rank0.pt`` is ``{"step", "world_size", "sharded", "model", "optimizer", "extra"}``; sharded tensors are plain pieces
with their place in the whole; ``tensors_rank0.json`` lists them.

Rules:
* No collectives, ever: another rank may be dead or stuck in one.
* If tensors are sharded, or an earlier save was refused because the ranks differ, every rank writes its own pieces, and
  a load needs the same number of ranks. Otherwise rank 0 writes model and optimizer, the other ranks only their own
  extra state, and any number of ranks can load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmirror.core.errors import IntegrityError, KindMismatch, UsageError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.formats.artifacts import write_json, write_pt
from ckptmirror.formats.base import LoadReport, Snapshot, WriteContext
from ckptmirror.formats.capture import capture_local
from ckptmirror.formats.load_model import load_model, warn_missing, warn_unused
from ckptmirror.formats.model import full_optimizer
from ckptmirror.formats.names import shard_again
from ckptmirror.formats.optimizer_order import refuse_other_order
from ckptmirror.formats.optimizer_state import load_optimizer, plan_optimizer
from ckptmirror.formats.rank_files import RankFiles
from ckptmirror.formats.shards import cut
from ckptmirror.formats.sidecars import load_extra, takes_schedule, tensor_list
from ckptmirror.formats.train_state import TrainState
from ckptmirror.formats.versions import versions_in
from ckptmirror.local.directories import make_dirs

__all__ = ["FORMAT", "EmergencyFormat", "load_emergency", "names_of_rank", "write_emergency"]

_RANK_FILE = re.compile(r"(?:.*/)?rank(\d+)\.pt")


def write_emergency(
    state: TrainState, directory: Path, *, save_id: str, rank: int, world_size: int, step: int, apart: bool = False
) -> list[Artifact]:
    """Write this rank's part of an emergency snapshot, from the live tensors, and publish it in ``directory``.

    Args:
        state: What to save.
        directory: The snapshot's.
        save_id: The snapshot's.
        rank: This process's rank.
        world_size: Number of ranks.
        step: The step.
        apart: Whether ranks are known to hold different values under one name, so that each writes its own.

    Returns:
        The artifacts, their paths relative to the parent of ``directory`` (the root).

    Raises:
        UsageError: Something in ``state`` could not be loaded back; names it.
    """
    snapshot = capture_local(state, step=step, with_ema=apart or rank == 0)
    of_each = apart or snapshot.sharded
    if rank != 0 and not of_each:
        snapshot = Snapshot({}, None, None, snapshot.extra, False)
    make_dirs(directory)
    content = {
        "step": step,
        "world_size": world_size,
        "sharded": of_each,
        "model": cut(snapshot.model),
        "optimizer": cut(snapshot.optimizer),
        "extra": cut(snapshot.extra),
    }
    pieces, listed = names_of_rank(rank)
    tensors = tensor_list(snapshot, rank=rank, world_size=world_size, sums=False)
    digests = {
        pieces: write_pt(content, directory / pieces, save_id=save_id, publish=True),
        listed: write_json(tensors, directory / listed, save_id=save_id, publish=True),
    }
    return [
        Artifact(path=f"{directory.name}/{name}", kinds=("emergency",), rank=rank, digest=digest)
        for name, digest in digests.items()
    ]


def names_of_rank(rank: int) -> tuple[str, str]:
    """Return the names of a rank's files in the snapshot's directory."""
    return f"rank{rank}.pt", f"tensors_rank{rank}.json"


def load_emergency(
    directory: Path,
    meta: Meta,
    state: TrainState,
    *,
    rank: int,
    world_size: int,
    exclude: frozenset[str] = frozenset(),
) -> LoadReport:
    """Load an emergency snapshot, including its extra state, into ``state``. Needs no other rank.

    Raises:
        IntegrityError: A file is missing, broken or hostile.
        UsageError: It does not fit the state.
        KindMismatch: It is sharded for another number of ranks: a kind that cannot be loaded here.
    """
    ranks = _ranks_of(meta, directory)
    source = RankFiles({r: directory / f"rank{r}.pt" for r in ranks}, rank)
    saved = source.tree()
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        raise IntegrityError(f"{directory.name}/rank{rank}.pt is not an emergency snapshot.")
    sharded = saved.get("sharded") is True
    if sharded and saved.get("world_size") != world_size:
        raise KindMismatch(
            f"The emergency snapshot holds what was on {saved.get('world_size')} ranks; this job has {world_size}.",
            hint="Start with the same number of ranks, save, and resume from that save with another number.",
        )
    shared = source if sharded else source.of(0)
    loaded: list[str] = []
    missing: list[str] = []
    optimizer, plans, dtypes = None, None, {}
    if state.optimizer is not None and "optimizer" not in exclude:
        shard_again(state.model)
        if shared.tree()["optimizer"] is None:
            missing.append(warn_missing("optimizer", "it starts without history"))
        else:
            optimizer = full_optimizer(shared.below("optimizer"), state.model)
            plans = plan_optimizer(state.model, state.optimizer, optimizer)
            refuse_other_order(plans, optimizer, lambda: takes_schedule(state, saved.get("extra"), exclude))
    elif "optimizer" not in exclude and shared.tree()["optimizer"] is not None:
        missing.append(warn_unused("optimizer"))
    if "model" not in exclude:
        tree = shared.tree()
        versions = (
            versions_in(tree["extra"], ("model",), directory.name) if isinstance(tree.get("extra"), dict) else None
        )
        dtypes = load_model(state.model, tree["model"], lambda name: shared.others(("model", name)), versions=versions)
        loaded.append("model")
    if optimizer is not None and plans is not None:
        load_optimizer(state.optimizer, plans, optimizer, dtypes)
        loaded.append("optimizer")
    rest = load_extra(
        source.below("extra"), state, step=meta.step, own=rank in ranks, world_size=world_size, exclude=exclude
    )
    return LoadReport(meta.step, (*loaded, *rest.loaded), (*missing, *rest.missing))


class EmergencyFormat:
    """Reads kind ``emergency``; :func:`write_emergency` writes it, in one go and without a host copy."""

    kind: Kind = "emergency"

    def write(self, snapshot: Snapshot, context: WriteContext) -> list[Artifact]:  # noqa: ARG002 - the seam's signature
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError("Emergency snapshots are written by save_emergency_checkpoint.")

    def check(self, context: WriteContext, artifacts: Sequence[Artifact]) -> None:
        """Do nothing: each file was checked as it was written."""

    def load(
        self,
        root: Path,
        meta: Meta,
        state: Any,
        *,
        rank: int,
        world_size: int,
        exclude: frozenset[str],
        torch_group: Any,  # noqa: ARG002 - the seam's signature
    ) -> LoadReport:
        """Load the whole snapshot, including its extra state, since it has no sidecars."""
        names = {artifact.path.split("/")[0] for artifact in meta.artifacts_of("emergency") if "/" in artifact.path}
        if len(names) != 1:
            raise IntegrityError(f"The meta names {len(names)} directories of an emergency snapshot.")
        return load_emergency(root / names.pop(), meta, state, rank=rank, world_size=world_size, exclude=exclude)


FORMAT = EmergencyFormat()


def _ranks_of(meta: Meta, directory: Path) -> list[int]:
    matches: Mapping[str, re.Match[str] | None] = {
        a.path: _RANK_FILE.fullmatch(a.path) for a in meta.artifacts_of("emergency")
    }
    ranks = sorted(int(match[1]) for match in matches.values() if match)
    if not ranks:
        raise IntegrityError(f"The meta names no file of {directory.name}.")
    return ranks
