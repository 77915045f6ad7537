"""Resume: one vote of all ranks on where training continues.

The job's leader, rank 0, finds a copy and proposes it (``flow/start/bring.py``). Where the job has several nodes, each
gathers the files that its ranks read (``flow/start/gather.py``). Every rank checks its share of the bytes before it
votes. If any rank votes no, all ranks move on to the next copy of the same save, then to the next older save.

Rules:
* The leaders of the other nodes say what is on their disks, and record the claim that the job's leader made. For the
  choice only the job's leader asks the mirrors.
* Nothing is loaded until the ranks together have verified its checksums on this disk.
* Once a rank has begun to load, only other copies of the same save are tried: loading an older save would leave parts
  of the newer one behind. If the start has to look again after a load, another save may only take the place of all
  that was loaded, and a start at step 0 fails.
* A requested step that is missing is an error on every rank; ``core.start.decide`` decides about starting at 0.
* The run is claimed after the load, so a start that fails leaves no trace. If another attempt or a newer save appeared
  in the meantime, the start looks again, a bounded number of times.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ckptmirror.core import events, names
from ckptmirror.core.errors import CkptMirrorError, IntegrityError, KindMismatch, Temporary, UsageError
from ckptmirror.core.load_options import LoadOptions
from ckptmirror.core.model import Attempt, Kind, Meta
from ckptmirror.core.name_rules import mark_of
from ckptmirror.core.rank_names import rank_name
from ckptmirror.core.stages import NO_STAGES, Stages
from ckptmirror.core.start.attempts import Claim
from ckptmirror.core.start.decide import Result, Wish
from ckptmirror.core.start.disks import Torn
from ckptmirror.core.start.evidence import DISK
from ckptmirror.core.start.sharing import Holding, fetched_by, transfers
from ckptmirror.core.tensor_lists import is_list, lost_lists
from ckptmirror.core.tensor_proof import Summed
from ckptmirror.flow.fetch.load_state import ResumeInfo, check_share, load_kind, names_elsewhere
from ckptmirror.flow.fetch.loaded_check import check_loaded, not_proved
from ckptmirror.flow.fetch.unchanged_check import UnchangedCheck, unchanged_check
from ckptmirror.flow.retention.reconcile import forget_brought
from ckptmirror.flow.start.bring import Bringer, Proposal
from ckptmirror.flow.start.claim import RunClaim, StartOver
from ckptmirror.flow.start.command import remember_command, settle_command
from ckptmirror.flow.start.disk_facts import DiskFacts, TakenNames
from ckptmirror.flow.start.gather import (
    Asked,
    Gathered,
    View,
    ask_mirror,
    bring_back,
    discard_view,
    relay,
    relay_s,
)
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.resume_policy import Policy, settled_policy
from ckptmirror.formats.train_state import left_out
from ckptmirror.local.listing import Fault
from ckptmirror.local.save_logger import save_logger
from ckptmirror.ranks.base import Ranks, exchange_result, gather_result
from ckptmirror.ranks.meeting import meet_until_done

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport, LoadTarget
    from ckptmirror.formats.train_state import TrainState

__all__ = ["Resumed", "resume_run"]

_log = logging.getLogger("ckptmirror.resume")
_STARTS_LIMIT = 5
_NOT_COMPARED = "tensors: "  # so begin the lines of a report that are not about what was loaded
T = TypeVar("T")


class Resumed(NamedTuple):
    """What came of a start.

    Attributes:
        info: What was loaded; None if training starts from scratch.
        run_id: The run's id.
        attempt: This attempt.
        torn: The saves for whose other parts no node of this job waits (see :meth:`Node.start`).
        renamed: The mark of ``rename`` (:meth:`NameRules.mark`) that this attempt's metas get.
        unchanged: Compares what was loaded with what the first step or save finds; None if it was not proved.
    """

    info: ResumeInfo | None
    run_id: str
    attempt: Attempt
    torn: frozenset[str]
    renamed: str
    unchanged: UnchangedCheck | None


def resume_run(
    root: Path,
    ranks: Ranks,
    node: Node | None,
    state: TrainState,
    *,
    policy: Policy = "auto",
    force: bool = False,
    options: LoadOptions,
    stages: Stages = NO_STAGES,
    bus: events.EventBus,
) -> Resumed:
    """Load the save that training continues from, on every rank.

    Args:
        node: Set on the leader of each node.
        policy: ``"auto"``; ``"scratch"`` (with ``force`` if there are saves); a step; ``"latest"``; a save id; or the
            path of a save in the root.
        options: What to load, and what to accept.
        stages: The stage of each rank.

    Raises:
        CheckpointNotFound: The requested save does not exist.
        RefusedOnlyCopy: There are saves, but none can be resumed.
        Temporary: A required mirror that may hold more does not answer, or a newer save cannot be read now.
    """
    started = time.monotonic()
    elsewhere = names_elsewhere(ranks, stages, state)
    mark, live_names = _mark_of_rename(ranks, state, options, elsewhere)
    exchange_result(ranks, functools.partial(_prepare, node, state, options), what="prepare a start")
    sees, others = _look_at_nodes(ranks, node) if ranks.nodes > 1 else ({}, [])
    bringer: Bringer | None = None

    def look() -> bool:
        nonlocal bringer
        assert node is not None
        reference, kind = settled_policy(node.root, policy)
        wish = Wish(reference, kind, force, ranks.world_size)
        bringer = Bringer(node, wish, bus, others, sees, without=options.exclude)
        bringer.settle()
        return True

    _meet_until_done(ranks, look if node is not None and ranks.rank == 0 else None, node, "look at every place")
    loaded: tuple[Meta, LoadReport] | None = None
    for _ in range(_STARTS_LIMIT):
        proposal, report, live = _load_first_sound(
            root, ranks, bringer, node, state, options, elsewhere, mark, live_names
        )
        if loaded is not None:
            check = functools.partial(_check_replaces, loaded, proposal.meta, report)
            exchange_result(ranks, check, what="compare what was loaded twice")
        claimed = _claim(ranks, bringer, node, proposal)
        if claimed is None:
            loaded = (proposal.meta, report) if proposal.meta is not None and report is not None else None
            continue
        attempt = claimed.record.attempt
        _report(bus, node, attempt, proposal, started, policy)
        info = _info(proposal, report, left_out(state, options.exclude)) if report is not None else None
        if info is not None and info.changed and ranks.rank == 0:
            bus.emit(events.CommandChanged(step=info.step, save_id=info.save_id, changes="; ".join(info.changed)))
        renamed = mark or mark_of(proposal.meta.architecture_hash if proposal.meta is not None else None)
        unchanged = unchanged_check(state, live, info.step, ranks) if info is not None else None
        return Resumed(info, proposal.run_id, attempt, claimed.torn.all, renamed, unchanged)
    raise Temporary(
        "Other attempts of this run keep starting, or saving, at the same time.",
        hint="Stop the others: one attempt of a run trains at a time.",
    )


def _check_replaces(before: tuple[Meta, LoadReport], meta: Meta | None, report: LoadReport | None) -> None:
    """Check that nothing stays of a save that this start had loaded before it had to look again.

    Args:
        before: That save, and the report of its load.
        meta: What training would continue from now; None: from step 0.
        report: The report of that load.

    Raises:
        Temporary: Parts of the first save would stay.
    """
    first, loaded = before
    now = "at step 0"
    if meta is not None and report is not None:
        stays = [line for line in report.missing if line not in loaded.missing and not line.startswith(_NOT_COMPARED)]
        if not stays:
            return
        now = f"from step {meta.step}, which does not have all that was loaded: {'; '.join(stays)}"
    raise Temporary(
        f"Step {first.step} was loaded; meanwhile another attempt changed where the run continues: {now}.",
        hint="Start the same command again: it begins with a fresh state.",
    )


def _mark_of_rename(
    ranks: Ranks, state: TrainState, options: LoadOptions, elsewhere: frozenset[str]
) -> tuple[str, frozenset[str]]:
    """Return the mark of ``rename``, which all ranks have alike, and the names of the model, of all stages."""
    if not options.rules.rename:
        return "", frozenset()
    from ckptmirror.formats.names import live_values

    names: frozenset[str] = frozenset()

    def mark() -> str:
        nonlocal names
        names = elsewhere.union(live_values(state.model))
        return options.rules.mark(names)

    marks = exchange_result(ranks, mark, what="compare what rename does")
    if (other := next((rank for rank, its in enumerate(marks) if its != marks[0]), None)) is not None:
        who = rank_name(other, ranks.nodes_of_ranks)
        raise UsageError(
            f"rename gives tensors other names on {who} than on rank 0.",
            hint="Give every rank one rename, which depends on nothing but a name.",
        )
    return marks[0], names


def _prepare(node: Node | None, state: TrainState, options: LoadOptions) -> None:
    remember_command(state, options.command_wins)
    if node is not None:
        node.prepare()


def _load_first_sound(
    root: Path,
    ranks: Ranks,
    bringer: Bringer | None,
    node: Node | None,
    state: TrainState,
    given: LoadOptions,
    elsewhere: frozenset[str],
    mark: str,
    live_names: frozenset[str],
) -> tuple[Proposal, LoadReport | None, list[Summed]]:
    """Load the first proposal that all ranks can load; return no report for a start at step 0.

    What this rank holds then is returned with its sums, if it was compared with what was saved.
    """
    from ckptmirror.formats.base import LoadTarget

    while True:
        proposal = _propose(ranks, bringer, node)
        if proposal.meta is None:
            return proposal, None, []
        options = replace(given, rules=given.rules.for_save(proposal.meta.architecture_hash, mark, live_names))
        if mark and ranks.rank == 0:
            said = "step %d: rename gives its tensors their names"
            if options.rules is not given.rules:
                said = "step %d: rename was done before, and its names stay"
            save_logger(_log, proposal.meta).info(said, proposal.meta.step)
        target = LoadTarget(state, ranks.rank, ranks.world_size, options.exclude, elsewhere, rules=options.rules)
        try:
            whose_lists = _lists_to_read(ranks, proposal) if options.verify_loaded else frozenset()
            found = _verified_here(root, ranks, node, proposal, target, whose_lists)
            place, read, view = found.place, found.read, found.view
            load = functools.partial(
                load_kind, place, read, proposal.kind, state, ranks, options, elsewhere, found.prepared
            )
            report = _load_together(load, ranks, read, state, options)
        except _CannotUse as why:
            freed = ranks.nodes > 1 and why.result is Result.NO_ROOM and _rotate_all(ranks, node, proposal.meta)
            if bringer is not None:
                bringer.reject(proposal, why.reason, why.result, why.error, freed=freed)
            if proposal.gathered and why.result is not Result.NOT_BROUGHT:
                _discard_all(root, ranks, node, proposal.meta)
        else:
            live: list[Summed] = []
            if options.verify_loaded and not lost_lists(proposal.meta):
                bring = functools.partial(_all_lists, ranks, node, proposal, view) if view is not None else None
                live, not_compared = check_loaded(
                    place, read, proposal.kind, state, ranks, report, options.rules, bring
                )
                report = replace(report, missing=report.missing + not_compared)
            return proposal, report, live


def _lists_to_read(ranks: Ranks, proposal: Proposal) -> frozenset[int]:
    """Return the ranks whose lists of tensors this node reads first; see :func:`_all_lists`."""
    meta = proposal.meta
    assert meta is not None
    of_one_mirror = [one for url, one in proposal.sources if url == proposal.place]
    if any(map(lost_lists, [meta, *of_one_mirror])):
        return frozenset()
    return frozenset(ranks.node_ranks if meta.world_size == ranks.world_size else {0, *ranks.node_ranks})


class _Verified(NamedTuple):
    """What a node has of a save for its ranks, once all ranks have verified theirs.

    Attributes:
        place: The directory with its files.
        read: The save with the files alone that the ranks of this node read.
        view: Set if these files were gathered.
        prepared: What is prepared for the load.
    """

    place: Path
    read: Meta
    view: View | None
    prepared: Any


class _CannotUse(Exception):
    """The ranks agree that a copy cannot be used. Every rank raises this, since all see the same votes.

    Attributes:
        error: What hinders a node from getting a file.
    """

    def __init__(self, reason: str, result: Result, error: CkptMirrorError | None = None) -> None:
        self.reason, self.result, self.error = reason, result, error


def _meet_until_done(ranks: Ranks, work: Callable[[], T] | None, node: Node | None, what: str) -> dict[int, T]:
    """Let leaders work, and return the results by rank; a node that is closed meanwhile waits for its thread."""

    def begun(thread: threading.Thread) -> None:
        assert node is not None
        node.bringing = thread

    return meet_until_done(ranks, work if node is not None else None, what, begun=begun)


def _propose(ranks: Ranks, bringer: Bringer | None, node: Node | None) -> Proposal:
    """Wait for the proposal of the job's leader."""
    return _meet_until_done(ranks, bringer.next if bringer is not None else None, node, "propose a save")[0]


def _look_at_nodes(ranks: Ranks, node: Node | None) -> tuple[Mapping[str, str | None], list[DiskFacts]]:
    """Return which places this node sees, and on the job's leader what the others see and know of their disks."""
    sees: Mapping[str, str | None] = {}
    places = exchange_result(ranks, lambda: node.places() if node is not None else {}, what="compare mirrors")
    remembered = frozenset[str]().union(*places)

    def look_for_mirrors() -> bool:
        nonlocal sees
        assert node is not None
        sees = node.sees(remembered)
        return True

    def look() -> DiskFacts | None:
        return None if node is None or ranks.rank == 0 else replace(node.look_at_disk(), sees=sees)

    meet_until_done(ranks, look_for_mirrors if node is not None else None, "look for mirrors that no node remembers")

    found = gather_result(ranks, look, what="look at the disks", to="first")
    return sees, [disk for disk in found.values() if disk is not None]


def _gather(
    root: Path,
    ranks: Ranks,
    node: Node | None,
    proposal: Proposal,
    target: LoadTarget,
    whose_lists: frozenset[int],
) -> View:
    """Gather on each node the files that its ranks read.

    Raises:
        _CannotUse: A node cannot get a file.
    """
    meta = proposal.meta
    assert meta is not None
    back: Mapping[int, Gathered] = {}
    if proposal.kept is not None:
        directory, kept = proposal.kept
        copy_back = functools.partial(bring_back, root, Path(directory), kept, ranks)
        back = _meet_until_done(ranks, copy_back if node is not None else None, node, "bring a snapshot")
        _check_all(ranks, back)
    whose = ranks.node_ranks if target.state.ema is None else (0, *ranks.node_ranks)  # rank 0 may have the only average
    sends = all(url != proposal.place for url, _ in proposal.sources)
    view = View(root, meta, proposal.kind, whose, whose_lists, trusted=proposal.trusted, sends=sends)
    _complete(ranks, node, proposal, view, view.begin, [back])
    read = gather_result(ranks, lambda: view.files_read(target), what="ask which files are read", to="node")
    for rank in ranks.node_ranks:
        view.need(read[rank])
    _complete(ranks, node, proposal, view, view.look, [back])
    return view


def _complete(
    ranks: Ranks,
    node: Node | None,
    proposal: Proposal,
    view: View,
    look: Callable[[], Holding],
    failed: Sequence[Mapping[int, Gathered]] = (),
) -> None:
    """Get what the views of the nodes lack: from the mirrors that send it, else from the disks of other nodes.

    ``failed`` says what nodes could not get before.

    Raises:
        _CannotUse: A node cannot get a file.
    """
    meta = proposal.meta
    assert meta is not None
    sizes_bytes = {artifact.path: artifact.digest.size_bytes for artifact in meta.artifacts}
    mine: Holding | None = None

    def lacks_any() -> bool:
        nonlocal mine
        if node is not None and ranks.rank != 0:
            node.take_places(proposal.places, proposal.expected, [url for url, _ in proposal.sources])
        mine = look()
        return bool(mine.lacks)

    lacking = _meet_until_done(ranks, lacks_any if node is not None else None, node, "gather a save")
    if not any(lacking.values()):
        return
    found = ranks.exchange(mine, what="find out which node has what")
    holdings = {rank: holding for rank, holding in enumerate(found) if holding is not None}
    failures = list(failed)
    for url, at_place in proposal.sources:
        named = {names.plain(one.path) for one in at_place.artifacts}
        to_fetch = fetched_by(holdings, named, sizes_bytes, shared=proposal.share_downloads)
        if not to_fetch:
            continue
        fetched = _fetch(ranks, node, proposal, (url, at_place), view, to_fetch)
        if proposal.place == url:
            _check_all(ranks, fetched)
        failures.append(fetched)
        for rank, one in fetched.items():
            holdings[rank] = holdings[rank].with_files(one.got)
    plan, absent = transfers(holdings, sizes_bytes)
    if needed := [path for path in absent if not is_list(path) or proposal.kind == "emergency"]:
        raise _why_absent(ranks, proposal, needed, holdings, failures)
    if plan:
        channel = ranks.channel("files", more_s=relay_s(plan, sizes_bytes))
        try:
            send = functools.partial(relay, channel, view, plan, sizes_bytes) if node is not None else None
            sent = _meet_until_done(ranks, send, node, "send a save from node to node")
        finally:
            channel.close()
        _check_all(ranks, sent)


def _why_absent(
    ranks: Ranks,
    proposal: Proposal,
    needed: Sequence[str],
    holdings: Mapping[int, Holding],
    failed: Sequence[Mapping[int, Gathered]],
) -> _CannotUse:
    """Return why no node can get files that are needed: first, that one cannot be read now where it may be whole."""
    for path in needed:
        for rank, holding in holdings.items():
            if (why := holding.unreadable.get(path)) is not None:
                return _CannotUse(f"{rank_name(rank, ranks.nodes_of_ranks)}: {why}", Result.UNREADABLE)
    if not proposal.trusted or proposal.kept is not None:  # nothing else has these files
        found = [(rank, one) for fetched in failed for rank, one in fetched.items() if one.error is not None]
        if found:
            return _not_got(ranks, *min(found, key=lambda one: (one[1].result in (None, Result.BROKEN), one[0])))
    return _CannotUse(f"no node has {needed[0]}" + ("" if proposal.trusted else " as it was saved"), Result.BROKEN)


def _fetch(
    ranks: Ranks,
    node: Node | None,
    proposal: Proposal,
    source: tuple[str, Meta],
    view: View,
    to_fetch: Mapping[int, Sequence[str]],
) -> dict[int, Gathered]:
    """Fetch from a mirror on each node what it is to fetch; return how that went, by rank (or rank 0 alone asked)."""
    url, at_place = source
    mirror = next((one for one in node.mirrors if one.url == url), None) if node is not None else None
    paths = {path for of_node in to_fetch.values() for path in of_node}
    ask = functools.partial(ask_mirror, mirror, at_place, paths) if mirror is not None and ranks.rank == 0 else None
    asked: Asked = _meet_until_done(ranks, ask, node, "ask for the objects of a save")[0]
    if asked.failed.result is not None:
        return {0: asked.failed}

    def fetch() -> Gathered:
        assert mirror is not None
        return view.fetch(mirror, at_place, to_fetch.get(ranks.rank, ()), asked, singly=proposal.place != url)

    return _meet_until_done(ranks, fetch if node is not None else None, node, "fetch a save")


def _rotate_all(ranks: Ranks, node: Node | None, meta: Meta) -> bool:
    """Rotate on each node, since any may be the one that has no room; return whether that freed space."""
    rotate = functools.partial(_rotated, node, meta) if node is not None else None
    return any(_meet_until_done(ranks, rotate, node, "make room").values())


def _rotated(node: Node, meta: Meta) -> bool:
    return bool(node.rotate(in_use={meta.save_id}).deleted)


def _discard_all(root: Path, ranks: Ranks, node: Node | None, meta: Meta) -> None:
    """Remove on each node what it gathered of a save that cannot be used."""
    exchange_result(ranks, lambda: discard_view(root, meta) if node is not None else None, what="discard a save")


def _verified_here(
    root: Path,
    ranks: Ranks,
    node: Node | None,
    proposal: Proposal,
    target: LoadTarget,
    whose_lists: frozenset[int],
) -> _Verified:
    """Get on each node what its ranks read of a save, and verify it on all ranks.

    Raises:
        _CannotUse: A node cannot get a file, or a file differs from what was saved.
    """
    meta = proposal.meta
    assert meta is not None
    if not proposal.gathered:
        read = replace(meta, artifacts=meta.artifacts_of(proposal.kind))
        prepared = _vote_on_bytes(root, ranks, read, proposal.kind, target, str)
        return _Verified(root, read, None, prepared)
    view = _gather(root, ranks, node, proposal, target, whose_lists)
    read = replace(meta, artifacts=tuple(view.needs.values()))
    prepared = _vote_on_bytes(view.path, ranks, read, proposal.kind, target, view.with_own_names)
    return _Verified(view.path, read, view, prepared)


def _all_lists(ranks: Ranks, node: Node | None, proposal: Proposal, view: View) -> Meta:
    """Bring the lists of tensors of all ranks of a save to the node of rank 0, and return what a node has then.

    If that fails, the load goes on: what could not be compared is said.
    """
    meta = proposal.meta
    assert meta is not None
    if 0 in ranks.node_ranks:
        view.need_lists(range(meta.world_size))
    with contextlib.suppress(_CannotUse):
        _complete(ranks, node, proposal, view, view.look)
    return replace(meta, artifacts=tuple(view.needs.values()))


def _check_all(ranks: Ranks, found: Mapping[int, Gathered]) -> None:
    """Check that every node got its files.

    Raises:
        _CannotUse: One did not. Its error is of the class that it was on that node, with its hint.
    """
    for rank, one in sorted(found.items()):
        if one.result is not None:
            raise _not_got(ranks, rank, one)


def _not_got(ranks: Ranks, rank: int, one: Gathered) -> _CannotUse:
    error = copy.copy(one.error)
    assert error is not None
    error.put_in_front(rank_name(rank, ranks.nodes_of_ranks))
    return _CannotUse(error.message, one.result or Result.BROKEN, error)


def _vote_on_bytes(
    root: Path, ranks: Ranks, read: Meta, kind: Kind, target: LoadTarget, named: Callable[[str], str]
) -> Any:
    """Check the bytes of what the ranks of this node read, on every rank; return what is prepared for the load.

    What is wrong is said with the names that ``named`` gives to files.

    Raises:
        _CannotUse: A rank found a file that differs from what was saved.
    """
    reason: Fault | None = None
    prepared: Any = None
    failure: BaseException | None = None
    try:
        reason, prepared = check_share(root, ranks, read, kind, target)
        reason = replace(reason, why=named(reason.why)) if reason is not None else None
    except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
        failure = error
    found = [vote for vote in ranks.exchange(reason, what="vote on a save", error=failure) if vote is not None]
    if found:
        worst = min(found, key=lambda fault: fault.unreadable)  # broken outweighs unreadable
        raise _CannotUse(worst.why, Result.UNREADABLE if worst.unreadable else Result.BROKEN)
    return prepared


def _load_together(
    load: Callable[[], LoadReport], ranks: Ranks, verified: Meta, state: TrainState, options: LoadOptions
) -> LoadReport:
    """Load on every rank, from the files that ``verified`` names alone, and vote on how it went.

    Raises:
        _CannotUse: A rank could not load it. A kind that does not fit (KindMismatch) is found before any rank changes
            anything.
    """
    report: LoadReport | None = None
    reason: tuple[str, Result] | None = None
    failure: BaseException | None = None
    try:
        report = load()
        report = replace(report, changed=settle_command(state, verified, report, options.command_wins))
    except KindMismatch as error:
        reason = (f"{rank_name(ranks.rank, ranks.nodes_of_ranks)}: {error}", Result.OTHER_RANKS)
    except (IntegrityError, FileNotFoundError) as error:
        reason = (f"{rank_name(ranks.rank, ranks.nodes_of_ranks)}: {error}", Result.TOUCHED)
    except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
        failure = error
    votes = ranks.exchange(reason, what="load a save", error=failure)
    reasons = [vote for vote in votes if vote is not None]
    if reasons:
        # If one rank refused, those that did load have changed state too.
        touched = None in votes or any(result is Result.TOUCHED for _, result in reasons)
        raise _CannotUse(reasons[0][0], Result.TOUCHED if touched else reasons[0][1])
    assert report is not None
    return report


@dataclass(frozen=True)
class _Claimed:
    """What the other nodes record of a claim that the job's leader made; see :meth:`Node.start`."""

    record: Claim
    unclaimed: Mapping[str, str]
    abandoned: Mapping[str, str]
    torn: Torn
    whole: frozenset[str]
    taken: TakenNames


def _claim(ranks: Ranks, bringer: Bringer | None, node: Node | None, proposal: Proposal) -> _Claimed | None:
    """Claim the run on the job's leader; return None on every rank if the start has to look again."""
    own: RunClaim | None = None

    def make() -> _Claimed | tuple[()]:
        nonlocal own
        assert bringer is not None
        try:
            own = bringer.claim(proposal)
        except StartOver as why:
            bringer.start_over(why)
            return ()
        torn = bringer.torn(own.attempt, proposal)
        return _Claimed(own.record, own.unclaimed, bringer.abandoned, torn, bringer.whole, bringer.taken)

    made = _meet_until_done(ranks, make if bringer is not None else None, node, "claim the run")[0]
    if not isinstance(made, _Claimed):
        return None

    def begin() -> None:
        if node is None:
            return
        claim = own
        if claim is None:
            node.take_places(proposal.places, proposal.expected)
            claim = RunClaim(node.root, node.table, node.mirrors, made.record, {})
            claim.join(made.unclaimed)
        node.remember_places({url: place for url, (place, _) in proposal.expected.items() if place})  # for verbs, too
        forget_brought(node.root)
        node.start(claim, made.abandoned, made.torn, made.whole, made.taken)

    exchange_result(ranks, begin, what="record the claim")
    return made


def _warn_about_latest(root: Path, chosen: Meta) -> None:
    """Warn if ``latest`` names an older step than is here: somebody may have re-pointed it, but it is not followed."""
    try:
        named = names.parse_name((root / names.LATEST_NAME).readlink().name)
        here = [names.parse_name(path.name) for path in root.iterdir()]
    except OSError:  # there is none, or it is not a link
        return
    has_chosen = any(one is not None and one.role == "meta" and one.step == chosen.step for one in here)
    if has_chosen and named is not None and named.step is not None and named.step < chosen.step:
        save_logger(_log, chosen).warning(
            "%s names step %d, and is not followed: training continues from step %d. To go back, stop it and %s.",
            root / names.LATEST_NAME,
            named.step,
            chosen.step,
            f"start it once with manager.resume(state, policy={named.step})"  # a verb sees the disk of one node
            if chosen.nodes > 1
            else f"run `ckptmirror rewind --root {quote(str(root))} --step {named.step}`",
        )


def _report(
    bus: events.EventBus,
    node: Node | None,
    attempt: Attempt,
    proposal: Proposal,
    started: float,
    policy: Policy,
) -> None:
    """Emit events on the leader only."""
    if node is None:
        return
    meta = proposal.meta
    if policy == "auto" and meta is not None and proposal.place == DISK:
        _warn_about_latest(node.root, meta)
    bus.emit(
        events.AttemptDecided(
            attempt=attempt.number,
            step=meta.step if meta is not None else None,
            save_id=meta.save_id if meta is not None else "",
            place=proposal.place if meta is not None else "",
            duration_s=time.monotonic() - started,
        )
    )


def _info(proposal: Proposal, report: LoadReport, not_wanted: tuple[str, ...]) -> ResumeInfo:
    assert proposal.meta is not None
    for part in not_wanted:  # what is missing was logged where it was found
        save_logger(_log, proposal.meta).warning("step %d: %s", proposal.meta.step, part)
    return ResumeInfo(
        step=proposal.meta.step,
        save_id=proposal.meta.save_id,
        kind=proposal.kind,
        place=proposal.place,
        loaded=report.loaded,
        missing=report.missing + not_wanted + not_proved(proposal.meta),
        changed=report.changed,
        passed_over=proposal.skipped,
    )
