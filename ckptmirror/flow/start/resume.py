"""Resume: one vote of all ranks on where training continues.

The leader finds a copy and proposes it (``flow/start/bring.py``). Every rank checks its share of the bytes before it
votes. If any rank votes no, all ranks move on to the next copy of the same save, then to the next older save.

Rules:
* Nothing is loaded until the ranks together have verified its checksums on this disk.
* Once a rank has begun to load, only other copies of the same save are tried: loading an older save would leave parts
  of the newer one behind.
* A requested step that is missing is an error on every rank; ``core.start.decide`` decides about starting at 0.
* The run is claimed after the load, so a start that fails leaves no trace. If another attempt or a newer save appeared
  in the meantime, the start looks again, a bounded number of times.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ckptmirror.core import events, names
from ckptmirror.core.errors import IntegrityError, KindMismatch, Temporary
from ckptmirror.core.model import Attempt, Kind, Meta
from ckptmirror.core.start.decide import Wish
from ckptmirror.flow.fetch.load_state import ResumeInfo, check_share, load_kind
from ckptmirror.flow.retention.reconcile import forget_brought
from ckptmirror.flow.start.bring import Bringer, Proposal
from ckptmirror.flow.start.claim import StartOver
from ckptmirror.flow.start.leader import Node
from ckptmirror.flow.start.resume_policy import Policy, settled_policy
from ckptmirror.formats.train_state import left_out
from ckptmirror.local.listing import Fault
from ckptmirror.local.save_logger import save_logger
from ckptmirror.ranks.base import Ranks

if TYPE_CHECKING:
    from ckptmirror.formats.base import LoadReport
    from ckptmirror.formats.train_state import TrainState

__all__ = ["resume_run"]

_log = logging.getLogger("ckptmirror.resume")
_SIGN_OF_LIFE_S = 10.0
_STARTS_LIMIT = 5


def resume_run(
    root: Path,
    ranks: Ranks,
    node: Node | None,
    state: TrainState,
    *,
    policy: Policy = "auto",
    force: bool = False,
    exclude: frozenset[str] = frozenset(),
    bus: events.EventBus,
) -> tuple[ResumeInfo | None, str, Attempt]:
    """Load the save that training continues from, on every rank.

    Args:
        node: Set on the leader.
        policy: ``"auto"``; ``"scratch"`` (with ``force`` if there are saves); a step; ``"latest"``; a save id; or the
            path of a save in the root.
        exclude: Parts of the state to leave unchanged.

    Returns:
        What was loaded (None: training starts from scratch), the run's id, and this attempt.

    Raises:
        CheckpointNotFound: The requested save does not exist.
        RefusedOnlyCopy: There are saves, but none can be resumed.
        Temporary: A required mirror that may hold more does not answer, or a newer save cannot be read now.
    """
    started = time.monotonic()
    bringer: Bringer | None = None
    failure: BaseException | None = None
    if node is not None:
        try:
            reference, kind = settled_policy(node.root, policy)
            wish = Wish(reference, kind, force, ranks.world_size)
            bringer = Bringer(node, wish, bus)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
    ranks.exchange(None, what="look at every place", error=failure)
    for _ in range(_STARTS_LIMIT):
        proposal, report = _load_first_sound(root, ranks, bringer, node, state, exclude)
        attempt = _claim(ranks, bringer, node, proposal)
        if attempt is None:
            continue
        _report(bus, node, attempt, proposal, started, policy)
        if report is None:
            return None, proposal.run_id, attempt
        return _info(proposal, report, left_out(state, exclude)), proposal.run_id, attempt
    raise Temporary(
        "Other attempts of this run keep starting, or saving, at the same time.",
        hint="Stop the others: one attempt of a run trains at a time.",
    )


def _load_first_sound(
    root: Path,
    ranks: Ranks,
    bringer: Bringer | None,
    node: Node | None,
    state: TrainState,
    exclude: frozenset[str],
) -> tuple[Proposal, LoadReport | None]:
    """Load the first proposal that all ranks can load; return no report for a start at step 0."""
    while True:
        proposal = _propose(ranks, bringer, node)
        if proposal.meta is None:
            return proposal, None
        try:
            _vote_on_bytes(root, ranks, proposal.meta, proposal.kind)
            return proposal, _load_together(root, ranks, proposal, state, exclude)
        except _CannotUse as found:
            if bringer is not None:
                bringer.reject(proposal, found.reason, touched=found.touched, unreadable=found.unreadable)


class _CannotUse(Exception):
    """The ranks agree that a copy cannot be used. Every rank raises this, since all see the same votes."""

    def __init__(self, reason: str, *, touched: bool, unreadable: bool = False) -> None:
        self.reason, self.touched, self.unreadable = reason, touched, unreadable


class _AtWork:
    """The leader's search for the next copy, in a thread, since a download may outlast every wait for a rank."""

    def __init__(self, bringer: Bringer, node: Node) -> None:
        self._done = threading.Event()
        self._found: tuple[Proposal | None, BaseException | None] = (None, None)
        node.bringing = threading.Thread(target=self._work, args=(bringer,), name="ckptmirror-propose", daemon=True)
        node.bringing.start()

    def _work(self, bringer: Bringer) -> None:
        try:
            self._found = (bringer.next(), None)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            self._found = (None, error)
        self._done.set()

    def wait(self) -> tuple[Proposal | None, BaseException | None]:
        """Return the copy or the error; neither if the search is still running."""
        return self._found if self._done.wait(_SIGN_OF_LIFE_S) else (None, None)


def _propose(ranks: Ranks, bringer: Bringer | None, node: Node | None) -> Proposal:
    """Wait for the leader's proposal. All ranks meet every few seconds, so that none takes the leader for dead."""
    work = _AtWork(bringer, node) if bringer is not None and node is not None else None
    while True:
        proposal, failure = work.wait() if work is not None else (None, None)
        for given in ranks.exchange(proposal, what="propose a save", error=failure):
            if given is not None:
                return given


def _vote_on_bytes(root: Path, ranks: Ranks, meta: Meta, kind: Kind) -> None:
    """Check the bytes on every rank.

    Raises:
        _CannotUse: A rank found a file that differs from what was saved.
    """
    reason: Fault | None = None
    failure: BaseException | None = None
    try:
        reason = check_share(root, ranks, meta, kind)
    except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
        failure = error
    found = [vote for vote in ranks.exchange(reason, what="vote on a save", error=failure) if vote is not None]
    if found:
        worst = min(found, key=lambda fault: fault.unreadable)  # broken outweighs unreadable
        raise _CannotUse(worst.why, touched=False, unreadable=worst.unreadable)


def _load_together(
    root: Path, ranks: Ranks, proposal: Proposal, state: TrainState, exclude: frozenset[str]
) -> LoadReport:
    """Load on every rank, and vote on how it went.

    Raises:
        _CannotUse: A rank could not load it. A kind that does not fit (KindMismatch) is found before any rank changes
            anything.
    """
    assert proposal.meta is not None
    report: LoadReport | None = None
    reason: tuple[str, bool] | None = None
    failure: BaseException | None = None
    try:
        report = load_kind(root, proposal.meta, proposal.kind, state, ranks, exclude)
    except KindMismatch as error:
        reason = (f"rank {ranks.rank}: {error}", False)
    except (IntegrityError, FileNotFoundError) as error:
        reason = (f"rank {ranks.rank}: {error}", True)
    except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
        failure = error
    votes = ranks.exchange(reason, what="load a save", error=failure)
    reasons = [vote for vote in votes if vote is not None]
    if reasons:
        # If one rank refused, those that did load have changed state too.
        raise _CannotUse(reasons[0][0], touched=any(touched for _, touched in reasons) or None in votes)
    assert report is not None
    return report


def _claim(ranks: Ranks, bringer: Bringer | None, node: Node | None, proposal: Proposal) -> Attempt | None:
    """Claim the run on the leader; return None on every rank if the start has to look again."""
    claimed: tuple[Attempt | None, bool] | None = None
    failure: BaseException | None = None
    if node is not None and bringer is not None:
        try:
            try:
                claim = bringer.claim(proposal)
                forget_brought(node.root)
                node.start(claim)
                claimed = (claim.attempt, True)
            except StartOver as why:
                bringer.start_over(why)
                claimed = (None, True)
        except BaseException as error:  # noqa: BLE001 - taken to the exchange, which raises it again
            failure = error
    votes = ranks.exchange(claimed, what="claim the run", error=failure)
    return next(vote for vote in votes if vote is not None)[0]


def _warn_about_latest(root: Path, chosen: Meta) -> None:
    """Warn if ``latest`` names an older step: somebody may have re-pointed it to go back, but it is not followed."""
    try:
        named = names.parse_name((root / names.LATEST_NAME).readlink().name)
    except OSError:  # there is none, or it is not a link
        return
    if named is not None and named.step is not None and named.step < chosen.step:
        save_logger(_log, chosen).warning(
            "%s names step %d, and is not followed: training continues from step %d. To go back, stop it and run "
            "`ckptmirror rewind --root %s --step %d`.",
            root / names.LATEST_NAME,
            named.step,
            chosen.step,
            quote(str(root)),
            named.step,
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
    if policy == "auto" and meta is not None:
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
    for part in not_wanted:
        save_logger(_log, proposal.meta).warning("step %d: %s", report.step, part)
    for part in report.missing:
        save_logger(_log, proposal.meta).warning("step %d: %s", report.step, part)
    return ResumeInfo(
        step=proposal.meta.step,
        save_id=proposal.meta.save_id,
        kind=proposal.kind,
        place=proposal.place,
        loaded=report.loaded,
        missing=report.missing + not_wanted,
        passed_over=proposal.skipped,
    )
