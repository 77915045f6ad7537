"""Kind ``model``: the whole, unsharded model in one plain file, and the optimizer beside it.

``model_000200.pt`` is a flat dict of name to tensor that ``torch.load(weights_only=True)`` loads and
``load_state_dict`` accepts, with the versions of the modules as its ``_metadata``. ``optim_000200_rank3.pt`` is
``{"state": {name: {...}}, "param_groups": [...]}``, with sharded tensors as plain pieces.

Rules:
* Rank 0 writes the model. If tensors are sharded, every rank writes its own optimizer file, otherwise only rank 0.
* A load compares names and shapes before it writes; it copies in place, shard by shard, and works on any number of
  ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptmirror.core.errors import IntegrityError, UsageError
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.names import SaveName, parse_name, tmp_name
from ckptmirror.formats.artifacts import write_pt
from ckptmirror.formats.base import LoadReport, LoadTarget, Snapshot, WriteContext
from ckptmirror.formats.load_model import plan_model
from ckptmirror.formats.load_parts import OwnValues, load_parts
from ckptmirror.formats.names import live_values
from ckptmirror.formats.optimizer_state import owners_of
from ckptmirror.formats.rank_files import RankFiles, named_file, rank_files
from ckptmirror.formats.shards import cut
from ckptmirror.formats.sidecars import rank_extras
from ckptmirror.formats.stages import check_patterns, elsewhere_in, join_groups
from ckptmirror.formats.versions import attached, plain_model, versions_in
from ckptmirror.formats.weights_only_values import as_torch_has_it, decode
from ckptmirror.untrusted.tensor_files import check_regular, load_pt

__all__ = ["FORMAT", "ModelFormat", "full_optimizer"]


class ModelFormat:
    """Reads and writes kind ``model``."""

    kind: Kind = "model"

    def write(self, snapshot: Snapshot, context: WriteContext) -> list[Artifact]:
        """Write and seal this rank's files; a rank that has nothing to write returns an empty list.

        Raises:
            UsageError: The snapshot was captured without kind ``model``.
        """
        written = []
        if context.rank == 0:
            if snapshot.full_model is None:
                raise UsageError('The snapshot was captured without kind "model".')
            values = {name: as_torch_has_it(value) for name, value in snapshot.full_model.items()}
            whole = attached(values, versions_in(snapshot.extra, ("model",)))
            written.append(_write(whole, context.name.model, context))
        if snapshot.optimizer is not None and (snapshot.sharded or context.rank == 0):
            written.append(_write(cut(snapshot.optimizer), context.name.optim(context.rank), context))
        return written

    def check(self, context: WriteContext, artifacts: Sequence[Artifact]) -> None:
        """Check that every file of this kind is on disk, has the right size and is a readable archive of tensors.

        Raises:
            IntegrityError: A file is not.
        """
        for artifact in artifacts:
            parsed = parse_name(artifact.path)
            if parsed is None or parsed.role not in ("model", "optim"):
                continue
            path = context.root / tmp_name(artifact.path, context.save_id)
            if check_regular(path) != artifact.digest.size_bytes:
                raise IntegrityError(f"{path} has not the {artifact.digest.size_bytes} bytes that were written.")
            load_pt(path, mmap=True)

    def prepare(self, root: Path, meta: Meta, target: LoadTarget, is_over: Callable[[], bool]) -> None:
        """Do nothing: the files are mapped."""

    def load(self, root: Path, meta: Meta, target: LoadTarget) -> LoadReport:
        """Load model and optimizer of ``meta``; see :class:`Format`."""
        name = SaveName(meta.step, meta.tag)
        module = target.state.model
        reader = target.rank if target.world_size == meta.world_size else 0  # whose file has all names
        files = rank_files(root, meta, name.optim, reader)

        def model(own: OwnValues) -> Callable[[], Mapping[str, torch.dtype]]:
            saved, versions = plain_model(load_pt(named_file(root, meta.paths, name.model), mmap=True), name.model)
            values = {key: decode(value) for key, value in saved.items()}
            check_patterns(values, live_values(module), target.elsewhere, target.rules)
            return plan_model(
                module,
                {**values, **own(values)},
                versions=versions,
                elsewhere=target.elsewhere,
                rules=target.rules,
                say=target.left.say,
            )

        return load_parts(
            target,
            model=model,
            optimizer=(lambda: full_optimizer(files, target)) if files is not None else None,
            extra=rank_extras(root, meta, target),
        )


FORMAT = ModelFormat()


def full_optimizer(source: RankFiles, target: LoadTarget) -> dict[str, Any]:
    """Return the full optimizer state that ``source`` holds, sharded like the live parameters.

    Left out is the state of the values that only other ranks hold.
    """
    tree = source.tree()
    if not isinstance(tree, dict) or "state" not in tree or "param_groups" not in tree:
        raise IntegrityError("The optimizer's file has no state and param_groups.")
    module = target.state.model
    owners = owners_of(tree["state"], module, target.rules)
    is_elsewhere = elsewhere_in(filter(_is_text, tree["state"]), live_values(module), target.elsewhere, target.rules)
    wanted = [name for name in tree["state"] if not (_is_text(name) and is_elsewhere(name))]
    state = {name: source.full_value(("state", name), owners.get(name)) for name in wanted}
    return {"state": state, "param_groups": join_groups(source.full_value(("param_groups",)))}


def _is_text(name: Any) -> bool:
    return type(name) is str


def _write(tree: Any, path: str, context: WriteContext) -> Artifact:
    digest = write_pt(tree, context.root / path, save_id=context.save_id)
    return Artifact(path=path, kinds=("model",), rank=context.rank, digest=digest)
