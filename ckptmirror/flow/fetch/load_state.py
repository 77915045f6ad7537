"""Loads a checkpoint into live objects, on every rank, for ``CheckpointManager.load``.

It does not affect the run: it claims no attempt, writes no parent, and changes nothing in the directory.

Rules:
* The leader of a node resolves the reference for its ranks. Every rank loads the same save, or none does.
* Each rank verifies a share of the bytes before anything is loaded. A legacy checkpoint has no checksums. Meanwhile
  memory is made for what the state does not have yet: nothing that it has is touched.
* From a mirror, each node fetches what its ranks read, once, to a temporary directory below the root, and verifies it
  as it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptmirror.core.errors import CheckpointNotFound, IntegrityError, KindMismatch, UsageError
from ckptmirror.core.load_options import LoadOptions
from ckptmirror.core.model import Kind, Meta
from ckptmirror.core.rank_names import rank_name
from ckptmirror.core.stages import NO_STAGES, Stages
from ckptmirror.core.tensor_lists import is_proof, lost_lists
from ckptmirror.flow.fetch.blocks import FileToRead, read_all
from ckptmirror.flow.fetch.load import meta_of
from ckptmirror.flow.fetch.loaded_check import check_loaded, not_proved
from ckptmirror.flow.fetch.loaded_objects import check_groups, check_objects
from ckptmirror.flow.fetch.partial import Fetch, begin_fetch, shard_ranges
from ckptmirror.flow.places.catalog import local_catalog
from ckptmirror.flow.places.legacy_references import look_up_older
from ckptmirror.flow.places.reference import CheckpointReference
from ckptmirror.flow.places.resolve import main_path, resolve_for_load
from ckptmirror.flow.places.select import choose
from ckptmirror.formats.train_state import PARTS, left_out
from ckptmirror.local.daemon_pool import begin
from ckptmirror.local.listing import Fault
from ckptmirror.ranks.base import Ranks, exchange_result, gather_result
from ckptmirror.ranks.meeting import meet_until_done

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport, LoadTarget
    from ckptmirror.formats.train_state import TrainState
from ckptmirror.local.save_logger import save_logger

__all__ = ["Reference", "ResumeInfo", "check_share", "load_kind", "load_state"]

_log = logging.getLogger("ckptmirror.load")
_NOT_FETCHED = frozenset(("optimizer",))  # of the parts that may be left out; the others are small, or wanted
Reference = str | int | Path | CheckpointReference


@dataclass(frozen=True)
class ResumeInfo:
    """Where training continues.

    Attributes:
        step: The step of the save that was loaded.
        kind: The kind that was loaded.
        place: ``"disk"``, or the URL of the mirror or the persistent directory that it was brought from; ``"anywhere"``
            if no place had it whole, and each file came from where it was. Of a ``load``: the path or the mirror's URL.
        loaded: Parts of the state that were loaded.
        missing: Parts of the state that the save does not hold, or that ``exclude`` left out.
        passed_over: Newer saves and copies that could not be used or that no list names, and mirrors that did not
            answer, each with the reason.
        changed: A line for each setting of an optimizer or a scheduler, and each value of the training config, that
            this command built otherwise than the one whose settings the save has.
    """

    step: int
    save_id: str
    kind: Kind
    place: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    passed_over: tuple[str, ...]
    changed: tuple[str, ...] = ()


def load_state(
    root: Path,
    ranks: Ranks,
    state: TrainState,
    reference: Reference,
    options: LoadOptions,
    stages: Stages = NO_STAGES,
) -> ResumeInfo:
    """Load the checkpoint ``reference`` into ``state``, on every rank of the job.

    Args:
        root: The directory in which a step, or ``"latest"``, is searched.
        reference: A step, ``"latest"``, or what :func:`resolve_checkpoint_reference` takes.
        options: What to load, and what to accept.
        stages: The stage of each rank.

    Raises:
        CheckpointNotFound: It does not exist.
        LoadDiffers: A tensor in memory is not what was saved.
        IntegrityError: A file differs from what was saved.
        StoreTemporary: The mirror does not answer.
        UsageError: It does not fit.
    """
    fetch: Fetch | None = None
    with ExitStack() as lent:

        def get() -> _Found:
            nonlocal fetch
            found = _resolve(root, reference, options.exclude)
            if isinstance(found.dir, Path):
                return _Found(found, found.dir, None)
            fetch = lent.enter_context(begin_fetch(found, options.exclude & _NOT_FETCHED, with_lists=True, below=root))
            return _Found(found, fetch.root, fetch.read)

        at_hand = meet_until_done(ranks, get if ranks.is_leader else None, "get a checkpoint")
        _check_same([one.reference for _, one in sorted(at_hand.items())])
        given, place, fetched = at_hand[ranks.node_ranks[0]]
        elsewhere = names_elsewhere(ranks, stages, state)
        if any(one.fetched is not None for one in at_hand.values()):
            _receive_shards(ranks, fetch, at_hand[ranks.node_ranks[0]], state, options, elsewhere)
        meta, prepared = fetched, None
        if fetched is None and given.save_id is not None:
            meta, prepared = _verified(ranks, given, state, options, elsewhere)
        load = partial(_load, ranks, given, place, meta, state, options, elsewhere, prepared)
        report = exchange_result(ranks, load, what="load a checkpoint")[ranks.rank]
        if meta is not None and options.verify_loaded:  # on every rank: the copies of two nodes may have other lists
            listed = replace(meta, artifacts=()) if lost_lists(meta) else meta
            _, not_compared = check_loaded(place, listed, given.kind, state, ranks, report, options.rules)
            report = replace(report, missing=report.missing + not_compared)
    not_wanted = left_out(state, options.exclude)
    for part in not_wanted:  # what is missing was logged where it was found
        save_logger(_log, given, rank=ranks.rank).warning("step %d: %s", given.step, part)
    missing = report.missing + not_wanted + (not_proved(meta) if meta is not None else ())
    return ResumeInfo(
        given.step, given.save_id or "", given.kind, str(given.path or given.dir), report.loaded, missing, ()
    )


class _Found(NamedTuple):
    """A checkpoint at hand.

    Attributes:
        reference: What was found.
        place: The directory with its files.
        fetched: Of one that is fetched from a mirror, the save with these files alone. Bytes are verified as they come.
    """

    reference: CheckpointReference
    place: Path
    fetched: Meta | None


def _receive_shards(
    ranks: Ranks, fetch: Fetch | None, found: _Found, state: TrainState, options: LoadOptions, elsewhere: frozenset[str]
) -> None:
    """Fetch on each node, once, what its ranks read of the shards of a save on a mirror. All ranks call this.

    Args:
        ranks: All ranks.
        fetch: On the leader of a node that fetches.
        found: What the node has.
        state: What is loaded into.
        options: What to load.
        elsewhere: The names that only other ranks hold.
    """

    def ranges() -> dict[str, list[range]]:
        if found.fetched is None:
            return {}
        from ckptmirror.formats.base import LoadTarget

        target = LoadTarget(state, ranks.rank, ranks.world_size, elsewhere=elsewhere, rules=options.rules)
        return shard_ranges(found.place, found.fetched, options.exclude & _NOT_FETCHED, target)

    read = gather_result(ranks, ranges, what="ask which bytes are read", to="node")

    def receive() -> bool:
        if fetch is not None:
            wanted: dict[str, list[range]] = {}
            for rank in ranks.node_ranks:
                for name, of_rank in read[rank].items():
                    wanted.setdefault(name, []).extend(of_rank)
            fetch.receive_shards(wanted)
        return True

    meet_until_done(ranks, receive if ranks.is_leader else None, "fetch a checkpoint")


def _check_same(resolved: Sequence[CheckpointReference]) -> None:
    """Check that the reference names one save on all nodes.

    Raises:
        UsageError: It does not.
    """
    first, *others = resolved
    for node, other in enumerate(others, start=1):
        if (other.save_id, other.step, other.kind) != (first.save_id, first.step, first.kind):
            saves = [f"{one.kind} of step {one.step} (save {(one.save_id or 'none')[:8]})" for one in (first, other)]
            raise UsageError(
                f"The reference names {saves[0]} on node 0, and {saves[1]} on node {node}.",
                hint="Stage the same step and kind on every node: `ckptmirror stage --step N --kind KIND`.",
            )


class Share(NamedTuple):
    """What a rank did before the ranks vote on a save.

    Attributes:
        fault: The first one in its share of the bytes.
        prepared: What :func:`load_kind` takes.
    """

    fault: Fault | None
    prepared: Any


def check_share(root: Path, ranks: Ranks, meta: Meta, kind: Kind, target: LoadTarget) -> Share:
    """Verify every n-th artifact of ``meta``, and prepare the load meanwhile. The ranks of a node verify all."""
    from ckptmirror.formats import get_format
    from ckptmirror.formats.names import live_values

    share = [one for one in meta.artifacts if not is_proof(one)][ranks.local_rank :: ranks.local_world_size]
    is_over = Event()
    with suppress(Exception):  # the load asks again
        live_values(target.state.model)  # FSDP2 reshards what a forward left unsharded: not in another thread
    preparing = begin(partial(get_format(kind).prepare, root, meta, target, is_over.is_set), "ckptmirror-prepare")
    try:
        faults = read_all([FileToRead(root / artifact.path, artifact.digest, cached=True) for artifact in share])
    finally:
        is_over.set()
    prepared = preparing.result() if preparing.exception() is None else None
    for artifact, found in zip(share, faults, strict=True):
        if found is not None:
            why = f"{rank_name(ranks.rank, ranks.nodes_of_ranks)}: {root / artifact.path}: {found.why}"
            return Share(Fault(why, unreadable=found.state == "unreadable"), None)
    return Share(None, prepared)


def names_elsewhere(ranks: Ranks, stages: Stages, state: TrainState) -> frozenset[str]:
    """Return the names of the model's values that only other stages hold. With stages, all ranks have to call it."""
    if not stages.of_ranks:
        return frozenset()
    from ckptmirror.formats.names import live_values

    own: frozenset[str] = frozenset()

    def names() -> frozenset[str] | None:
        nonlocal own
        own = frozenset(live_values(state.model))
        return own if ranks.rank == stages.peers(ranks.rank, ranks.world_size)[0] else None

    found = exchange_result(ranks, names, what="ask which names each stage has")
    return frozenset(name for names in found if names is not None for name in names) - own


def load_kind(
    root: Path,
    meta: Meta,
    kind: Kind,
    state: TrainState,
    ranks: Ranks,
    options: LoadOptions,
    elsewhere: frozenset[str] = frozenset(),
    prepared: Any = None,
) -> LoadReport:
    """Load one kind of a verified save in ``root`` into the state, including its sidecars, and no file of another.

    ``prepared`` is what :func:`check_share` returned.
    """
    from ckptmirror.formats import get_format
    from ckptmirror.formats.base import LoadTarget
    from ckptmirror.formats.emergency import emergency_extra, emergency_merge_extra
    from ckptmirror.formats.sidecars import extra_tree, load_sidecars, merge_extra

    meta = replace(meta, artifacts=meta.artifacts_of(kind))
    is_whole = kind == "emergency"  # its files hold everything
    target = LoadTarget(
        state,
        ranks.rank,
        ranks.world_size,
        options.exclude,
        elsewhere,
        options.allow_cold_optimizer,
        options.rules,
        prepared=prepared,
    )

    def load(agree: Callable[[], None]) -> LoadReport:
        def before_change() -> None:
            (emergency_merge_extra if is_whole else merge_extra)(root, meta, target)
            agree()

        return get_format(kind).load(root, meta, replace(target, before_change=before_change))

    report = _together(ranks, load) if ranks.world_size != meta.world_size else load(lambda: None)
    if options.verify_loaded and not is_whole:
        check_groups(state, report.groups)
    if not is_whole:
        report += load_sidecars(root, meta, target)
    if options.verify_loaded:
        check_objects(state, report.loaded, (emergency_extra if is_whole else extra_tree)(root, meta, target))
    return report


def _together(ranks: Ranks, load: Callable[[Callable[[], None]], LoadReport]) -> LoadReport:
    """Load so that what does not fit, or cannot be merged, on one rank changes nothing on any rank.

    Args:
        ranks: All of them call this.
        load: Calls what it is given before it changes anything.

    Raises:
        RankFailed: It does not fit on another rank.
    """
    has_met = False

    def agree(error: BaseException | None = None) -> None:
        nonlocal has_met
        if not has_met:
            has_met = True
            ranks.exchange(None, what="compare a save with the state", error=error)

    try:
        return load(agree)
    except (IntegrityError, FileNotFoundError, KindMismatch):  # a start then votes on this copy
        agree()
        raise
    except BaseException as error:
        agree(error)
        raise


def _resolve(root: Path, reference: Reference, exclude: frozenset[str]) -> CheckpointReference:
    if isinstance(reference, bool):
        raise UsageError(f"{reference!r} is not a reference.")
    is_of_root = isinstance(reference, int) or reference == "latest"
    try:
        if not isinstance(reference, int):
            return resolve_for_load(root if is_of_root else reference, exclude)
        meta, kind = choose(local_catalog(root).without(exclude), reference, staged=True)
        return CheckpointReference(root, meta.step, kind, meta.save_id, main_path(root, meta, kind))
    except CheckpointNotFound as error:
        if is_of_root and any(
            one.meta is not None and one.meta.nodes > 1 for one in local_catalog(root).problems.values()
        ):
            error.hint = (
                "A node's disk has only the files of its own ranks. Give the URL of a mirror, such as "
                "gs://bucket/run/dcp_000200, or stage the save on every node: `ckptmirror stage --step N --kind KIND`."
            )
        raise


def _verified(
    ranks: Ranks, found: CheckpointReference, state: TrainState, options: LoadOptions, elsewhere: frozenset[str]
) -> tuple[Meta, Any]:
    """Return the meta, and what is prepared for the load, once the ranks have verified every byte together."""
    from ckptmirror.formats.base import LoadTarget

    root = found.dir
    assert isinstance(root, Path)
    target = LoadTarget(state, ranks.rank, ranks.world_size, options.exclude, elsewhere, rules=options.rules)
    meta: Meta | None = None
    prepared: Any = None

    def check() -> Fault | None:
        nonlocal meta, prepared
        meta = meta_of(root, found, options.exclude)
        read = replace(meta, artifacts=meta.artifacts_of(found.kind))
        fault, prepared = check_share(root, ranks, read, found.kind, target)
        return fault

    for fault in exchange_result(ranks, check, what="verify a checkpoint"):
        if fault is not None:
            raise IntegrityError(f"Step {found.step} cannot be loaded: {fault.why}.")
    assert meta is not None
    return meta, prepared


def _load(
    ranks: Ranks,
    found: CheckpointReference,
    place: Path,
    meta: Meta | None,
    state: TrainState,
    options: LoadOptions,
    elsewhere: frozenset[str],
    prepared: Any,
) -> LoadReport:
    if meta is not None:
        return load_kind(place, meta, found.kind, state, ranks, options, elsewhere, prepared)
    from ckptmirror.formats.base import LoadTarget
    from ckptmirror.formats.legacy import load_legacy, read_legacy

    one = look_up_older(found)
    wants_extra = bool(set(PARTS) - {"model", "optimizer"} - options.exclude)
    saved = read_legacy(one.path, one.kind, one.extra if wants_extra else None)
    target = LoadTarget(state, ranks.rank, ranks.world_size, options.exclude, rules=options.rules)
    return load_legacy(saved, one.path, target, one.step)
