"""From live objects to a :class:`Snapshot`: on the training thread, before the host copy.

Rules:
* Nothing is cloned: a snapshot's tensors are the live ones, so the host copy must be made before training continues.
  The one exception is the full model of a sharded one, which is gathered to the host memory of rank 0, one parameter at
  a time.
* Collectives run only for that gathering, in the calling thread, in the same order on every rank.
* If all ranks hold the same value, rank 0 saves it (if the model is in stages, the first rank of the stage). The other
  ranks leave out buffers (whose running averages may differ), extra state and EMA, and everything but the sidecar if no
  kind of the save needs more from them. ``left_out`` holds what they leave out, so that it can be compared.
* What the state declares as each rank's own (``per_rank``) is in the kinds only as the first rank has it; the other
  ranks have theirs in their extra state, and each has its whole EMA, which has averages of it.
* A value that a safe load could not read back is refused here, by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckptmirror.core import per_rank
from ckptmirror.core.containers import any_leaf, placed_leaves
from ckptmirror.core.errors import RankFailed, UsageError
from ckptmirror.core.model import Kind
from ckptmirror.core.stages import NO_STAGES, Stages
from ckptmirror.formats.base import Snapshot
from ckptmirror.formats.command import KEY as COMMAND
from ckptmirror.formats.command import command_of
from ckptmirror.formats.extra_aliases import KEY as ALIASES
from ckptmirror.formats.extra_aliases import aliases_of
from ckptmirror.formats.names import bare, live_parameters, live_values
from ckptmirror.formats.optimizer_state import capture_optimizer
from ckptmirror.formats.rng import capture_rng
from ckptmirror.formats.shards import region_of
from ckptmirror.formats.state_tree import has_position, position_of, state_of, warn_left_alone
from ckptmirror.formats.tensor_bytes import DEVICE_ERRORS, is_wrapper
from ckptmirror.formats.train_state import PARTS, SETTINGS, TrainState, check_state
from ckptmirror.formats.versions import KEY, clean_versions, to_text
from ckptmirror.formats.weights_only_values import MARK, encode, has_shards
from ckptmirror.untrusted.read_limits import too_deep

__all__ = ["HAS_OPTIMIZER", "capture", "capture_local", "snapshot_from_tree", "snapshot_tree", "walk_tensors"]

HAS_OPTIMIZER = "has_optimizer"
_COMPARED_PLAIN = 10_000  # letters of a text, items of a list


def capture(
    state: TrainState,
    *,
    step: int,
    kinds: Sequence[Kind],
    rank: int,
    world_size: int,
    stages: Stages = NO_STAGES,
    before_collectives: Callable[[BaseException | None], None] = lambda _: None,
) -> Snapshot:
    """Return what this rank contributes to a save.

    All ranks call this at the same step. The tensors of the result are the live ones.

    Args:
        state: What to save.
        step: The step.
        kinds: The kinds of the save.
        rank: This process's rank.
        world_size: Number of ranks.
        stages: The stage of each rank.
        before_collectives: Called on every rank before the first collective, if there is one, with this rank's failure;
            it raises on all ranks if one failed, so that none waits in a collective for a rank that never comes.

    Raises:
        UsageError: Something in ``state`` could not be loaded back; the message names it.
    """
    gathers = "model" in kinds and has_shards(state.model)
    peers = stages.peers(rank, world_size)
    is_first = rank == peers[0]
    try:
        snapshot = capture_local(state, step=step, with_ema=bool(stages.of_ranks) or is_first)
        if not stages.of_ranks:  # else the patterns are for all of them
            per_rank.check_patterns(state.per_rank, snapshot.model)
        if "dcp" in kinds:
            _check_for_dcp(snapshot)
    except BaseException as error:
        if gathers:
            before_collectives(error)
        raise
    if gathers:
        before_collectives(None)
    whole: dict[str, Any] | None = None
    if "model" in kinds and snapshot.sharded:
        whole = _gather(state.model, snapshot.model, keep=rank == 0)
    elif "model" in kinds and rank == 0:
        whole = dict(snapshot.model)
    model, optimizer = snapshot.model, snapshot.optimizer
    buffers = _buffers(state.model, model) if len(peers) > 1 else {}
    if not is_first and not snapshot.sharded and "dcp" not in kinds:
        model, optimizer = {}, None
    elif not is_first:
        model = {name: value for name, value in model.items() if name not in buffers}
    extra = per_rank.recorded(snapshot, rank, world_size, is_here=not is_first)
    names = per_rank.names_in(extra)
    if not is_first:
        model, optimizer = per_rank.without(model, optimizer, names)
    left_out, moments = per_rank.without(snapshot.model, snapshot.optimizer if optimizer is None else None, names)
    rest = {"model": {name: value for name, value in left_out.items() if name not in model}, "optimizer": moments}
    return replace(
        snapshot,
        extra=extra,
        model=model,
        optimizer=optimizer,
        full_model=whole,
        buffers=frozenset(name for name, _ in walk_tensors({"model": buffers})),
        left_out={**snapshot.left_out, **dict(walk_tensors(rest))},
        plain=_hashes_of_plain(snapshot.model, names) if len(peers) > 1 else {},
    )


def capture_local(state: TrainState, *, step: int, with_ema: bool) -> Snapshot:
    """Return what this rank holds, without talking to any other rank and without the whole model.

    Args:
        state: What to save.
        step: The step.
        with_ema: Whether this rank saves an EMA that is not sharded, and the same on all ranks.
    """
    try:
        return _capture_local(state, step=step, with_ema=with_ema)
    except RecursionError as error:
        raise too_deep({"extra": state.extra}, "") from error


def _capture_local(state: TrainState, *, step: int, with_ema: bool) -> Snapshot:
    check_state(state)
    others = [n for n, v in vars(state).items() if n not in (*PARTS, *SETTINGS) and v is not None]
    if unknown := [name for name in others if not name.startswith("_")]:
        raise UsageError(
            f"The state has {', '.join(unknown)}, which no save would keep.",
            hint="Put it in TrainState(extra={...}).",
        )
    if FullyShardedDataParallel.fsdp_modules(state.model):
        raise UsageError(
            "The model is wrapped by FullyShardedDataParallel, whose flat parameters cannot be saved by name.",
            hint="Shard it with torch.distributed.fsdp.fully_shard.",
        )
    values = live_values(state.model)
    model = {name: encode(value, f"model.{name}") for name, value in values.items()}
    versions = clean_versions(state.model, values.metadata)
    for name, value in model.items():
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise UsageError(
                f"model.{name} is a tensor of layout {value.layout}; ckptmirror saves dense tensors only.",
                hint="Register it with persistent=False and make it when the model is built, or keep its indices and "
                "values in two buffers, or a dense one.",
            )
        if not isinstance(value, torch.Tensor) and has_shards(value):
            raise UsageError(
                f"model.{name} holds a DTensor, which a load could not shard again there.",
                hint="Return plain values from get_extra_state(), or make it a buffer.",
            )
    optimizer = capture_optimizer(state.model, state.optimizer) if state.optimizer is not None else None
    sharded = has_shards(model) or has_shards(optimizer)
    own_average = bool(state.per_rank)  # it has averages of what each rank has of its own
    extra, ema = _capture_extra(state, step=step, with_ema=sharded or with_ema or own_average, model=model)
    if versions is not None:
        extra[KEY].append([["model"], to_text(versions)])
    own = per_rank.matching(state.per_rank, model)
    if state.per_rank:
        extra[per_rank.KEY] = {"patterns": list(state.per_rank), "names": own}
    if split := [name for name in own if isinstance(model[name], DTensor)]:
        raise UsageError(
            f"per_rank matches {split[0]}, which is a DTensor: each rank's shard of it is saved as it is.",
            hint="Take the names of DTensors out of per_rank.",
        )
    _, whole = per_rank.without(model, optimizer, own)
    return Snapshot(
        model,
        optimizer,
        None,
        extra,
        sharded or has_shards(extra),
        architecture=_hash_of_shapes(model),
        parameters=_hash_of_shapes({bare(name): p for name, p in state.model.named_parameters()}),
        optimizer_holds=_hash_of_holdings(whole["state"]) if whole is not None and not sharded else "",
        left_out=dict(walk_tensors({"ema": ema})),
    )


def snapshot_tree(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot as one tree, for the host copy."""
    tree = {name: value for name, value in vars(snapshot).items() if name != "left_out"}
    return {**tree, "buffers": tuple(snapshot.buffers)}


def snapshot_from_tree(tree: Mapping[str, Any]) -> Snapshot:
    """Rebuild the snapshot from a copy of its :func:`snapshot_tree`."""
    return Snapshot(**{**tree, "buffers": frozenset(tree["buffers"])})


def _hash_of_holdings(state: dict[str, Any]) -> str:
    # Looking up the state of a parameter that has none would create an empty one.
    held = [(str(name), sorted(map(str, of)) if isinstance(of, dict) else []) for name, of in state.items() if of != {}]
    return hashlib.sha256(repr(sorted(held)).encode()).hexdigest()


def walk_tensors(tree: Any) -> list[tuple[str, Any]]:
    """Return (dotted name, tensor) of every tensor in a tree."""
    return [(".".join(map(str, path)), leaf) for path, leaf in placed_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _hashes_of_plain(model: Mapping[str, Any], own: Collection[str]) -> dict[str, str]:
    """Return a hash of what ``get_extra_state()`` returned beside tensors, but for names of each rank's own.

    Values of which not each part can be compared as text, such as sets and objects, have none, nor have large ones.
    """
    found = {}
    for name, value in model.items():
        if not isinstance(value, torch.Tensor) and name not in own and (text := _text_of_plain(value)) is not None:
            found[f"model.{name}"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return found


def _text_of_plain(value: Any) -> str | None:
    """Return a text that equal values share; tensors are left out. None if there may be none."""
    if isinstance(value, torch.Tensor):
        return ""
    if isinstance(value, Sized) and len(value) > _COMPARED_PLAIN:  # the training waits meanwhile
        return None
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) in (list, tuple):
        parts = [_text_of_plain(one) for one in value]
    elif type(value) is dict and MARK not in value:
        keys = sorted(value, key=repr)
        parts = [text for key in keys for text in (_text_of_plain(key), _text_of_plain(value[key]))]
    else:
        return None
    known = [part for part in parts if part is not None]
    return f"{type(value).__name__}({','.join(known)})" if len(known) == len(parts) else None


def _hash_of_shapes(model: Mapping[str, Any]) -> str:
    lines = sorted(f"{name} {tuple(v.shape)} {v.dtype}" for name, v in model.items() if isinstance(v, torch.Tensor))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _gather(live: torch.nn.Module, model: Mapping[str, Any], *, keep: bool) -> dict[str, Any] | None:
    """Collective: gather every sharded value, one at a time; tied ones once, by an identity that all ranks share."""
    identity = {name: id(parameter) for name, parameter in live_parameters(live)}
    gathered: dict[int, torch.Tensor | None] = {}
    whole: dict[str, Any] = {}
    failure: BaseException | None = None
    for name, value in model.items():
        if not isinstance(value, DTensor):
            whole[name] = value
            continue
        key = identity.get(name, -1 - len(gathered))
        if key not in gathered:
            full = _gathered(name, value)
            try:
                gathered[key] = full.cpu() if keep and failure is None else None
            except (RuntimeError, MemoryError) as error:  # no memory; but the other ranks wait in the next collectives
                gathered[key], failure = None, error
            del full
        whole[name] = gathered[key]
    if failure is not None:
        raise failure
    return whole if keep else None


def _gathered(name: str, value: DTensor) -> torch.Tensor:
    try:
        return value.full_tensor()
    except DEVICE_ERRORS:
        raise
    except RuntimeError as error:
        raise RankFailed(f"{name} cannot be gathered from the ranks, as kind model needs: {error}") from error


def _buffers(live: torch.nn.Module, model: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {name for name, _ in live_parameters(live)}
    return {name: value for name, value in model.items() if not (isinstance(value, DTensor) or name in parameters)}


def _capture_extra(
    state: TrainState, *, step: int, with_ema: bool, model: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return the extra state, and the average if rank 0 saves it for this rank."""
    versions: list[list[Any]] = []
    extra: dict[str, Any] = {"step": step, "rng": capture_rng(), HAS_OPTIMIZER: state.optimizer is not None}
    extra[COMMAND] = command_of(state)
    for name in ("scheduler", "scaler"):
        part = getattr(state, name)
        if part is not None:
            extra[name] = encode(state_of(part, name, versions=versions, path=(name,)), name)
    warn_left_alone(state.dataloader)
    if any_leaf(state.dataloader, has_position):
        extra["dataloader"] = encode(position_of(state.dataloader, "dataloader"), "dataloader")
    ema = None
    if state.ema is not None:
        ema = encode(state_of(state.ema, "ema", versions=versions, path=("ema",)), "ema")
        if with_ema or has_shards(ema):  # it may be sharded even if each rank holds the full model
            extra["ema"] = ema
    if state.extra is not None:
        own = {
            key: state_of(value, f"extra.{key}", versions=versions, path=("extra", key))
            for key, value in state.extra.items()
        }
        extra["extra"] = encode(own, "extra")
    extra[KEY] = encode(versions, KEY)
    shared = aliases_of(state.model, state.ema, state.extra, (model, ema, extra.get("extra")))
    extra[ALIASES] = encode(shared, ALIASES)
    for name, tensor in walk_tensors({key: value for key, value in extra.items() if key != "rng"}):
        try:
            region_of(tensor)
        except UsageError as error:
            raise UsageError(f"{name} is a DTensor in several pieces per rank, which cannot be saved there.") from error
    return extra, ema if "ema" not in extra else None


def _check_for_dcp(snapshot: Snapshot) -> None:
    for name, tensor in walk_tensors({"model": snapshot.model, "optimizer": snapshot.optimizer}):
        if is_wrapper(tensor):
            raise UsageError(
                f"{name} is a tensor of type {type(tensor).__qualname__}, whose parts kind dcp does not keep.",
                hint='Save it with kinds=("model",).',
            )
