"""The seam between ckptmirror and the bytes of one kind.

A save is: :func:`ckptmirror.formats.capture.capture` (live tensors, on the training thread), a host copy of the
result's tree, then :meth:`Format.write` of each kind in the background, then :meth:`Format.check` on the node's
leader, which publishes the files when their upload records are durable (flow/save/commit.py). Adding a kind is one file
that registers a :class:`Format`.

Rules:
* ``write`` uses only host memory and its own files; it never uses the training's process group.
* Every byte is checksummed as it is written. Nothing appears under its final name before it is complete and fsynced.
* Nothing is unpickled without an allow-list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ckptmirror.core.command_changes import NO_COMMAND, Command
from ckptmirror.core.model import Artifact, Kind, Meta
from ckptmirror.core.name_rules import ALL_NAMES, NameRules
from ckptmirror.core.names import SaveName
from ckptmirror.core.stages import NO_STAGES, Stages

__all__ = ["Format", "LoadReport", "LoadTarget", "Missing", "Snapshot", "WriteContext"]

_log = logging.getLogger("ckptmirror.formats")


@dataclass(frozen=True)
class Snapshot:
    """What one rank contributes to a save. All fields are pytrees of dict/list/tuple, tensors and plain values.

    Attributes:
        model: The parameters and buffers that this rank holds (DTensors where sharded), by clean name (no ``module.``,
            no ``_orig_mod.``).
        optimizer: Optimizer state keyed by parameter name (``get_optimizer_state_dict``), or None.
        full_model: The whole unsharded model on rank 0 if kind "model" was asked for, else None. If the model is not
            sharded these are the same tensors as in ``model``, and a host copy that keeps aliases copies them once.
        extra: This rank's scheduler, RNG, scaler, EMA, data position, user's extra, step.
        sharded: Whether the ranks hold different pieces (then every rank writes its own ``optim_*``; else rank 0
            alone).
        buffers: The dotted names of the model's tensors that are neither parameters nor shards: rank 0's are saved.
        left_out: By dotted name, the live tensors that rank 0 saves for this rank.
        plain: By dotted name, a hash of what is no tensor in a value of the model; empty if no other rank compares it.
        architecture: Hash of the full model's names, shapes and dtypes: equal on every rank, however it is sharded.
        parameters: The same of the parameters alone, without prefixes of wrappers.
        optimizer_holds: Hash of what the optimizer has state of; "" if it is sharded, or if there is none.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    full_model: dict[str, Any] | None
    extra: dict[str, Any]
    sharded: bool
    buffers: frozenset[str] = frozenset()
    left_out: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""
    parameters: str = ""
    optimizer_holds: str = ""


@dataclass(frozen=True)
class WriteContext:
    """Where and for whom a rank writes.

    Attributes:
        root: The local root.
        name: Step and tag of the save's names, the same on every rank of the node.
        save_id: 32 hex digits.
        kinds: All kinds of this save.
        rank: Global rank; ``world_size`` ranks in all.
        is_leader: Whether this rank leads its node.
        torch_group: A separate CPU process group that only this thread uses; None in a single process.
        nodes_of_ranks: The node of each rank, for messages; empty in a job of one node.
        stages: The stage of each rank.
    """

    root: Path
    name: SaveName
    save_id: str
    kinds: tuple[Kind, ...]
    rank: int
    world_size: int
    is_leader: bool
    torch_group: Any = None
    nodes_of_ranks: tuple[int, ...] = ()
    stages: Stages = NO_STAGES

    @property
    def stage(self) -> int | None:
        """The stage of this rank; None if there are no stages."""
        return self.stages.of(self.rank)


@dataclass(frozen=True)
class LoadTarget:
    """What a rank fills.

    Attributes:
        state: The ``TrainState``.
        rank: Global rank; ``world_size`` ranks load.
        exclude: Parts of the state to leave unchanged.
        elsewhere: The names of the model's values that only other ranks hold: those of other stages.
        allow_cold_optimizer: Whether only one of the save and the state may have an optimizer.
        rules: Which of the model's names are loaded, and under which names.
        left: Lines about names that are not loaded.
        before_change: Called once all of model and optimizer is compared, before anything changes; it may raise.
        merged: What ``formats.merging`` has merged, by its place in the files.
        prepared: What :meth:`Format.prepare` returned for this load; None: nothing is prepared.
    """

    state: Any
    rank: int
    world_size: int
    exclude: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    allow_cold_optimizer: bool = True
    rules: NameRules = ALL_NAMES
    left: Missing = field(default_factory=lambda: Missing())
    before_change: Callable[[], None] = lambda: None
    merged: dict[Any, Any] = field(default_factory=dict)
    prepared: Any = None


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        loaded: Which parts of the state were loaded ("model", "optimizer", "scheduler", "rng", ...).
        missing: Parts of the state that the save lacks, each with what happened to it.
        command: The settings in force in the save, of the live groups in order.
        changed: Lines about what this command built otherwise.
        groups: The groups of optimizers in the save, of the live groups in order.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    command: Command = NO_COMMAND
    changed: tuple[str, ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()

    def __add__(self, rest: LoadReport) -> LoadReport:
        command = self.command if self.command != NO_COMMAND else rest.command
        return LoadReport(self.loaded + rest.loaded, self.missing + rest.missing, command, groups=self.groups)


class Missing(list[str]):
    """A line for each part of the state that a load does not restore, logged as it is added."""

    def lacks(self, part: str, what: str = "state; it stays as it is") -> None:
        """Add that the save lacks a part."""
        self.append(f"{part}: {what}")
        _log.warning("The save holds no %s", self[-1])

    def unused(self, part: str) -> None:
        """Add that nothing here takes a part of the save."""
        self.say(f"{part}: the save has state for it, and your TrainState has nothing that takes it; it was not loaded")

    def say(self, line: str, but: str = "") -> None:
        """Add a line; ``but`` is for the log alone."""
        self.append(line)
        _log.warning("%s%s", line, but)


class Format(Protocol):
    """One kind of save."""

    kind: Kind

    def write(self, snapshot: Snapshot, context: WriteContext) -> list[Artifact]:
        """Write this rank's files of this kind and return them, with their final paths and digests.

        Files that other kinds need too (``extra_*``, ``tensors_*``) are written by ``formats.sidecars``, once a save.
        Every file is sealed (complete, checksummed, fsynced) but left under its temporary name: a file as
        ``core.names.tmp_name(name, save_id)`` beside its final name, a directory's files under their own names inside
        the directory's temporary name. The node's leader publishes them all, once their records are durable.
        """
        ...

    def check(self, context: WriteContext, artifacts: Sequence[Artifact]) -> None:
        """On the leader, after every rank of the node reported, before publishing: structure check of what was written.

        Raises:
            IntegrityError: The files on disk are not consistent; the save is not committed.
        """
        ...

    def prepare(self, root: Path, meta: Meta, target: LoadTarget, is_over: Callable[[], bool]) -> Any:
        """In another thread, while the bytes are verified: make memory for the load, and return what it takes.

        No value is read, and nothing of the target changes. It may raise anything: the load then goes without it.
        """
        ...

    def load(self, root: Path, meta: Meta, target: LoadTarget) -> LoadReport:
        """Load model and optimizer (not the sidecars) of ``meta``, whose files are in ``root``. Talk to no other rank.

        Raises:
            IntegrityError: A file is missing, broken or hostile.
            UsageError: It does not fit the model or the optimizer.
        """
        ...
