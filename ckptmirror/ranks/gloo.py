"""The channel between ranks, over its own gloo groups.

Each rank sends its report to the channel's rank 0, which sends the answer back, point to point. If a rank dies, rank 0
sees the connection close and tells the others which rank it was; if rank 0 dies, every other rank sees that itself.
Rank 0 reads the ranks in order, so it notices a death once the lower ranks have reported, or at the limit. It sends to
each rank only the values that this rank reads.

Rules:
* Nothing is ever sent on the training's group. A channel has two groups of its own, one for messages and one for
  callers (``torch_group``), so that a failed collective on the second cannot block the report of its failure.
* Every wait ends at the channel's limit. A wait that times out closes the gloo connections and so breaks the channel;
  it leaves the reason in the group's store, where the ranks that were cut off find it.
* What torch itself does not end at the limit runs in a thread, which is left behind then. gloo waits five times as long
  for a rank that died or was stopped while it connected, and torch waits for an answer of its store without any limit.
* If a collective of a caller fails in gloo, or because the training destroyed all groups, the rank closes its
  connections of that group before it reports that: other ranks may wait in the collective for this one, which will not
  come. All ranks can renew the group then.
* A broken channel raises the same error at once in every later exchange.
* Only an error from gloo means that a rank is gone. An error while reading a message is this rank's own, and is raised.
* ``close`` sends nothing.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptmirror.core.errors import (
    CkptMirrorError,
    LocalStorageFull,
    LocalStorageUnwritable,
    RankFailed,
    UsageError,
    WaitTimeout,
)
from ckptmirror.core.rank_names import rank_name
from ckptmirror.local.daemon_pool import begin_or_do, is_over
from ckptmirror.ranks.base import Readers, exchange_result
from ckptmirror.ranks.messages import START_AGAIN, Answer, Report, decide, failure_of, pack_value, refusal
from ckptmirror.ranks.nodes import NodeLayout, Probe, joined, layout_of, ranks_by_node

__all__ = ["GlooRanks", "frame_bytes"]

T = TypeVar("T")

_TAG = 7301
_FIND_NODES = "find out who shares a root"
_FRAME_BYTES = 4096
_SIZE_BYTES = 8
_REASON_LIMIT_S = 1.0
_REASON_POLL_S = 0.02
_STORE_LIMIT_S = 5.0
_groups_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # from each group that was given


class GlooRanks:
    """All ranks of ``process_group``, as one of them sees them. Ranks count from 0 within that group."""

    def __init__(self, process_group: Any, *, name: str, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise UsageError(f"a wait needs a limit above 0 s, not {timeout_s}")
        self._parent = process_group
        self._timeout_s = timeout_s
        self._name = name
        self._number = 0
        self._known: set[int] = set()  # ranks with which bytes were exchanged
        self._busy = threading.Lock()
        self._broken: CkptMirrorError | None = None
        self._closed = False
        self._group, self._torch_group, self._store = _in_time(
            lambda: _groups_and_store(process_group, name, timeout_s),
            f"ckptmirror:{name}: not all ranks came",
            timeout_s,
        )
        self._rank: int = self._group.rank()
        self._size: int = self._group.size()
        self._lost_torch_group = False
        self._renewed = 0
        self._layout = NodeLayout(0, 1, tuple(range(self._size)), self._rank)
        self._nodes = [self._layout.ranks]

    @classmethod
    def open(
        cls, process_group: Any, *, node_key: str, probe: Probe | None, timeout_s: float, error: BaseException | None
    ) -> GlooRanks:
        """Open the first channel of a job, for :func:`ckptmirror.ranks.open_ranks`."""
        ranks = cls(process_group, name="first", timeout_s=timeout_s)
        if isinstance(error, CkptMirrorError) and ranks._size > 1:
            ranks._name_host(error)
        try:
            keys = ranks.exchange(node_key, what=_FIND_NODES, error=error)
            if probe is not None and len(set(keys)) > 1:
                keys = ranks._joined(keys, probe)
        except BaseException:
            ranks.close()
            raise
        ranks._layout, ranks._nodes = layout_of(keys, ranks._rank), ranks_by_node(keys)
        return ranks

    def _name_host(self, error: CkptMirrorError) -> None:
        """Name the host in an error of this rank: no node has its number yet."""
        error.put_in_front(f"rank {self._rank} on host {os.uname().nodename}")

    def _joined(self, keys: list[str], probe: Probe) -> list[str]:
        """Return the keys with one key for each root, found by tokens in the roots."""
        asks = keys.index(keys[self._rank]) == self._rank

        def leave() -> str:
            try:
                return probe.leave() if asks else ""
            except CkptMirrorError as error:
                self._name_host(error)
                raise

        try:
            tokens = exchange_result(self, leave, what=_FIND_NODES)
            seen = exchange_result(self, lambda: probe.seen(tokens) if asks else [], what=_FIND_NODES)
        finally:
            probe.remove()
        return joined(keys, seen)

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._size

    @property
    def node(self) -> int:
        """This process's node, from 0."""
        return self._layout.node

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self._layout.nodes

    @property
    def local_rank(self) -> int:
        """This process's rank within its node, from 0."""
        return self._layout.local_rank

    @property
    def local_world_size(self) -> int:
        """Number of ranks on this node."""
        return len(self._layout.ranks)

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """All ranks on this node."""
        return self._layout.ranks

    @property
    def nodes_of_ranks(self) -> tuple[int, ...]:
        """The node of each rank; empty in a job of one node."""
        return self._layout.of_ranks

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its node."""
        return self._layout.local_rank == 0

    @property
    def timeout_s(self) -> float:
        """The limit of every wait on this channel."""
        return self._timeout_s

    @property
    def torch_group(self) -> Any:
        """A gloo group of the same ranks, for torch APIs that need one; only this channel's thread uses it."""
        return self._torch_group

    @property
    def lost_torch_group(self) -> bool:
        """Whether a collective on ``torch_group`` failed here."""
        return self._lost_torch_group

    def renew_torch_group(self) -> None:
        """Replace ``torch_group``; all ranks call this at the same place. See :class:`Ranks`.

        The new group is named after the old one, not by torch's count of groups: the training may create one meanwhile.
        """
        self._refuse_if_gone(self._torch_group, "kind dcp")
        self._renewed += 1
        old, limit = self._torch_group, timedelta(seconds=self._timeout_s)
        members, name = dist.get_process_group_ranks(old), f"{self._group.group_name}:{self._renewed}"

        def connect() -> tuple[Any]:
            store = _store_of(self._group)
            if store is not None:
                store.set_timeout(limit)
            return (_named_group(members, name, f"ckptmirror:{self._name}:torch", limit, store),)

        (group,) = _in_time(connect, "not all ranks connected again", self._timeout_s)
        if group is None:
            raise RankFailed(
                "a collective failed earlier, and this version of torch cannot connect the ranks again",
                hint="Start the job again: it continues from the last save.",
            )
        self._torch_group, self._lost_torch_group = group, False
        dist.destroy_process_group(old)

    def exchange(self, value: T, *, what: str, error: BaseException | None = None) -> list[T]:
        """Send ``value`` or ``error`` to all ranks and return every rank's value, by rank. See :class:`Ranks`."""
        return list(self._in_turn(value, what, "all", error).values())

    def gather(self, value: T, *, what: str, to: Readers, error: BaseException | None = None) -> dict[int, T]:
        """Send ``value`` to some ranks, or ``error`` to all, and return what this rank is sent. See :class:`Ranks`."""
        return self._in_turn(value, what, to, error)

    def _in_turn(self, value: T, what: str, to: Readers | Literal["all"], error: BaseException | None) -> dict[int, T]:
        if not self._busy.acquire(blocking=False):
            raise UsageError(f"{what}: this channel is in use by another thread; open one with channel()")
        try:
            return self._exchange(value, what, to, error)
        finally:
            self._busy.release()

    def _exchange(self, value: T, what: str, to: Readers | Literal["all"], error: BaseException | None) -> dict[int, T]:
        broken = self._broken
        if self._closed:
            raise error or UsageError(
                f"{what}: the manager of these ranks is closed.",
                hint="Call it before close(), or create a CheckpointManager again.",
            )
        if broken is not None:
            before = type(broken)(f"{what}: the channel broke before: {broken.message}", hint=START_AGAIN)
            if isinstance(broken, RankFailed) and isinstance(before, RankFailed):
                before.is_death = broken.is_death
            raise error if error is not None else before
        data = b""
        if error is None:
            try:
                data = pack_value(value)
            except UsageError as unsendable:
                error = unsendable
        if error is not None and (_is_of_gloo(error) or _is_gone(self._torch_group)):
            self._break_torch_group()
        self._number += 1
        report = Report(self._number, what, data, failure_of(error) if error is not None else None)
        deadline = time.monotonic() + self._timeout_s
        answer = (self._talk_first if self._number == 1 else self._talk)(report, to, deadline)
        if answer.outcome == "values":
            return answer.values()
        refused = refusal(answer, what, self.nodes_of_ranks)
        if answer.outcome != "failed":
            self._broken = refused
        is_of_gloo = isinstance(error, RuntimeError) and not isinstance(error, CkptMirrorError)
        if error is not None and not (is_of_gloo and answer.outcome == "missing"):
            if self.nodes > 1 and isinstance(error, (LocalStorageFull, LocalStorageUnwritable)):
                error.put_in_front(self._named(self._rank))  # which disk: the paths of all nodes may be alike
            raise error
        raise refused from error  # gloo's error, if any, does not name the rank that is gone

    def _talk(self, own: Report, to: Readers | Literal["all"], deadline: float) -> Answer:
        return self._collect(own, to, deadline) if self._rank == 0 else self._deliver(own, deadline)

    def _talk_first(self, own: Report, to: Readers | Literal["all"], deadline: float) -> Answer:
        """Do the same where gloo may have to connect, as it does then with ``TORCH_GLOO_LAZY_INIT=1``."""
        talked = begin_or_do(lambda: self._talk(own, to, deadline), "ckptmirror-connect")
        if is_over(talked, self._timeout_s + 2 * _more_s(self._timeout_s)):  # it ends before, but for connecting
            return talked.result()
        who = f"{self._named(0)} did not answer" if self._rank > 0 else "not all ranks connected"
        return self._late(own, f"{who} within {self._timeout_s:g} s")

    def _break_torch_group(self) -> None:
        """Close the connections of the callers' group. gloo has no call for it, but a wait that times out does it."""
        self._lost_torch_group = True
        for peer in range(self._size):
            try:
                if peer != self._rank:
                    _wait(self._torch_group.recv([_over(bytearray(1))], peer, _TAG), time.monotonic())
            except RuntimeError:
                continue  # the first that is alive timed out, or all are gone

    def send(self, data: memoryview, to: int) -> None:
        """Send bytes to one rank. See :class:`Ranks`."""
        self._pass(self._group.send, data, to)

    def receive(self, into: memoryview, source: int) -> None:
        """Receive bytes from one rank. See :class:`Ranks`."""
        self._pass(self._group.recv, into, source)

    def _pass(self, call: Callable[[list[torch.Tensor], int, int], Any], data: memoryview, peer: int) -> None:
        if self._broken is not None:
            raise self._broken
        deadline = time.monotonic() + self._timeout_s

        def pass_on() -> None:
            _wait(call([_over(data)], peer, _TAG), deadline)

        try:
            if peer in self._known:
                pass_on()
            else:
                passed = begin_or_do(pass_on, "ckptmirror-connect")
                if not is_over(passed, self._timeout_s + _more_s(self._timeout_s)):  # as in _talk_first
                    raise RuntimeError(f"no connection within {self._timeout_s:g} s")
                passed.result()
                self._known.add(peer)
        except RuntimeError as error:
            reason = self._reason_of(peer)
            self._broken = RankFailed(f"{self._named(peer)} is gone: {reason or _words(error)}")
            self._broken.is_death = not reason and time.monotonic() < deadline
            raise self._broken from error

    def channel(self, name: str, *, more_s: float = 0.0) -> GlooRanks:
        """Open another channel between the same ranks (all ranks call this in the same order). See :class:`Ranks`."""
        self._refuse_if_gone(self._parent, f"the channel {name!r}")
        other = GlooRanks(self._parent, name=name, timeout_s=self._timeout_s)
        other._layout, other._nodes = self._layout, self._nodes
        other.exchange(None, what=f"open channel {name}")
        other._timeout_s += more_s
        return other

    def _refuse_if_gone(self, group: Any, who: str) -> None:
        """Raise on all ranks if the training has destroyed the groups on one: the others would wait for it."""

        def check() -> None:
            if _is_gone(group):
                raise UsageError(
                    f"the process groups were destroyed: {who} needs them.",
                    hint="Call close() before torch.distributed.destroy_process_group(), and create the manager after "
                    "init_process_group().",
                )

        exchange_result(self, check, what="see whether the process groups are there")

    def close(self) -> None:
        """Release both groups. Needs no other rank; ranks that still wait for this one get an error."""
        if self._closed:
            return
        self._closed = True
        self._broken = self._broken or RankFailed("the channel is closed")
        for group in (self._group, self._torch_group):
            _destroy(group)
        self._group = self._torch_group = self._store = None

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def _collect(self, own: Report, to: Readers | Literal["all"], deadline: float) -> Answer:
        """Receive every rank's report, decide, and send the answer to all ranks that can still be reached."""
        frames = {peer: bytearray(_FRAME_BYTES) for peer in range(1, self._size)}
        works: dict[int, Any] = {}
        messages: list[bytearray] = []
        missing: dict[int, str] = {}
        for peer, frame in frames.items():
            try:
                works[peer] = self._group.recv([_over(frame)], peer, _TAG)
            except RuntimeError as error:  # it was gone before this began
                missing[peer] = self._why_gone(peer, error)
        for peer, work in works.items():
            try:
                _wait(work, deadline)
                messages.append(self._whole(frames[peer], peer, deadline))
            except RuntimeError as error:
                if time.monotonic() >= deadline:
                    return self._late(own, f"{self._named(peer)} did not take part within {self._timeout_s:g} s")
                missing[peer] = self._why_gone(peer, error)
        if missing:
            peers = "; ".join(f"{self._named(peer)} is gone: {why}" for peer, why in sorted(missing.items()))
            answer = Answer("missing", reason=peers)
            self._tell([(answer, works.keys() - missing.keys())], deadline)
            return answer
        reports = [own, *map(_report, messages)]
        answer = decide(reports)
        self._tell(self._answers(answer, reports, to), deadline)
        return answer

    def _answers(
        self, answer: Answer, reports: Sequence[Report], to: Readers | Literal["all"]
    ) -> Iterator[tuple[Answer, Iterable[int]]]:
        """Return what is sent to whom."""
        peers = range(1, self._size)
        if answer.outcome != "values" or to == "all":
            yield answer, peers
        elif to == "first":
            yield Answer("values"), peers
        else:
            for ranks in self._nodes:
                yield Answer.with_values(reports, ranks), [rank for rank in ranks if rank != 0]

    def _late(self, own: Report, reason: str) -> Answer:
        self._leave_reason(f"{reason} (in {own.what!r})")
        return Answer("late", reason=reason)

    def _tell(self, answers: Iterable[tuple[Answer, Iterable[int]]], deadline: float) -> None:
        pending = []
        for answer, peers in answers:
            pieces = _frames(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))  # one copy for all of them
            for peer in peers:
                try:
                    pending += [self._group.send([piece], peer, _TAG) for piece in pieces]
                except RuntimeError:
                    continue  # it died meanwhile: the next exchange names it
        for work in pending:
            try:
                _wait(work, deadline)
            except RuntimeError:
                continue

    # -- every other rank -----------------------------------------------------------------------------------------

    def _deliver(self, report: Report, deadline: float) -> Answer:
        """Send this rank's report to rank 0 and return the answer."""
        # Rank 0 may run into its limit just before this, and its reason names the missing rank: let it speak first.
        answer_deadline = deadline + _more_s(self._timeout_s)
        try:
            for work in [self._group.send([p], 0, _TAG) for p in _frames(pickle.dumps(report))]:
                _wait(work, answer_deadline)
            frame = bytearray(_FRAME_BYTES)
            _wait(self._group.recv([_over(frame)], 0, _TAG), answer_deadline)
            message = self._whole(frame, 0, answer_deadline)
        except RuntimeError as error:
            if time.monotonic() >= answer_deadline:
                reason = f"{self._named(0)} did not answer within {self._timeout_s:g} s"
                self._leave_reason(f"{reason} (in {report.what!r})")
                return Answer("late", reason=reason)
            if reason := self._reason_of(0):
                return Answer("late", reason=reason.removesuffix(f" (in {report.what!r})"))
            return Answer("missing", reason=f"{self._named(0)} is gone: {_words(error)}")
        return cast(Answer, pickle.loads(message))  # noqa: S301  sent by the same job's ranks

    # -- both -----------------------------------------------------------------------------------------------------

    def _whole(self, frame: bytearray, peer: int, deadline: float) -> bytearray:
        """Return the message that begins in ``frame``, after receiving the rest of it."""
        size = int.from_bytes(frame[:_SIZE_BYTES], "little")
        data = frame[_SIZE_BYTES : _SIZE_BYTES + size]
        if size > len(data):
            rest = bytearray(size - len(data))
            _wait(self._group.recv([_over(rest)], peer, _TAG), deadline)
            data += rest
        return data

    def _named(self, peer: int) -> str:
        return rank_name(peer, self.nodes_of_ranks)

    def _why_gone(self, peer: int, error: RuntimeError) -> str:
        return self._reason_of(peer) or _words(error)

    def _leave_reason(self, reason: str) -> None:
        """Store why this rank gave up, where the ranks whose connection it closed can read it."""
        if self._store is not None:
            try:
                self._store.set(f"reason/{self._rank}", reason)
            except RuntimeError:
                self._store = None  # its server is gone: the others see a closed connection and no reason

    def _reason_of(self, peer: int) -> str:
        """Return why ``peer`` gave up, or "" if it left no reason."""
        store = self._store
        if store is None:
            return ""
        asked = begin_or_do(lambda: _reason_in(store, peer), "ckptmirror-reason")
        if is_over(asked, 2 * _REASON_LIMIT_S) and asked.exception() is None:
            return asked.result()
        self._store = None  # its server is gone, or stopped: a thread that still asks it keeps the connection
        return ""


def _is_gone(group: Any) -> bool:
    """Whether the training has destroyed all groups."""
    try:
        return not dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return True


def _is_of_gloo(error: BaseException) -> bool:
    is_own = isinstance(error, CkptMirrorError)
    return isinstance(error, RuntimeError) and not is_own and "/gloo/" in str(error)  # it names its source line


def _words(error: RuntimeError) -> str:
    """Return the first sentence of gloo's error, without its source line."""
    said = re.sub(r"^\[\S*\] ", "", str(error)).partition(". ")[0].splitlines()
    return f"it died, or closed its channel ({said[0] if said else type(error).__name__})"


def _wait(work: Any, deadline: float) -> None:
    # gloo counts whole milliseconds: one that is cut off would end the wait before the deadline, as if the rank were
    # gone. A limit of 0 would mean the group's default.
    work.wait(timedelta(milliseconds=max(math.ceil((deadline - time.monotonic()) * 1000), 1)))


def _over(memory: bytearray | memoryview) -> torch.Tensor:
    """Return a tensor over ``memory`` for gloo to send or fill. It does not need NumPy, which may not be installed."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def _report(message: bytearray) -> Report:
    return cast(Report, pickle.loads(message))  # noqa: S301  sent by the same job's ranks


def frame_bytes(size_bytes: int) -> int:
    """Return how many bytes a message of this size takes on the wire, without gloo's own."""
    return max(_FRAME_BYTES, _SIZE_BYTES + size_bytes)


def _frames(data: bytes) -> list[torch.Tensor]:
    """Cut a message: a first frame of fixed size that begins with the length, and the rest if there is one."""
    first = bytearray(_FRAME_BYTES)
    first[:_SIZE_BYTES] = len(data).to_bytes(_SIZE_BYTES, "little")
    room = _FRAME_BYTES - _SIZE_BYTES
    head = data[:room]
    first[_SIZE_BYTES : _SIZE_BYTES + len(head)] = head
    pieces = [_over(first)]
    if len(data) > room:
        pieces.append(_over(bytearray(data[room:])))
    return pieces


def _more_s(timeout_s: float) -> float:
    """Return how much longer to wait for a message that says which rank is missing."""
    return min(5.0, 1.0 + 0.1 * timeout_s)


def _in_time(create: Callable[[], tuple[Any, ...]], missed: str, timeout_s: float) -> tuple[Any, ...]:
    """Return what ``create`` returns: groups, perhaps with their store.

    If it is not over at the limit, or Ctrl-C comes, its thread is left behind. Should it still create its groups, it
    destroys them: the other ranks give up too.

    Raises:
        WaitTimeout: It failed in torch, or was not over at the limit. The message begins with ``missed``.
    """
    created = begin_or_do(create, "ckptmirror-connect")
    try:
        in_time = is_over(created, timeout_s + _more_s(timeout_s))
    except BaseException:  # Ctrl-C
        created.add_done_callback(_destroy_created)
        raise
    if not in_time:
        created.add_done_callback(_destroy_created)
        raise WaitTimeout(f"{missed} within {timeout_s:g} s (a rank, or the host of torch's store, does not answer)")
    try:
        return created.result()
    except RuntimeError as error:
        raise WaitTimeout(f"{missed} within {timeout_s:g} s ({_who_is_missing(error)})") from error


def _who_is_missing(error: RuntimeError) -> str:
    """Return for which rank torch's store waited in vain, or the error's own words."""
    key = re.search(r"^wait timeout after .*, keys: \S*/(\d+)$", str(error), re.MULTILINE)
    return f"{rank_name(int(key[1]), ())} did not" if key else str(error)


def _destroy_created(created: Future[tuple[Any, ...]]) -> None:
    if created.exception() is None:
        for group in created.result():
            if isinstance(group, dist.ProcessGroup):
                _destroy(group)


def _destroy(group: Any) -> None:
    with suppress(ValueError, AssertionError):  # the training destroyed all groups before
        dist.destroy_process_group(group)


def _groups_and_store(process_group: Any, name: str, timeout_s: float) -> tuple[Any, Any, Any]:
    """Create the two groups of a channel, and connect to their store."""
    group = _new_group(process_group, f"ckptmirror:{name}", timeout_s)
    try:
        return group, _new_group(process_group, f"ckptmirror:{name}:torch", timeout_s), _store_of(group)
    except BaseException:
        _destroy(group)
        raise


def _new_group(process_group: Any, description: str, timeout_s: float) -> Any:
    """Create a gloo group over the ranks of ``process_group`` (None: all)."""
    everyone = process_group is None or process_group is dist.group.WORLD
    members = None if everyone else dist.get_process_group_ranks(process_group)
    if members is not None and (process_group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank() not in members):
        raise UsageError("this process is not in the process group that was given")
    limit = timedelta(seconds=timeout_s)
    if members is None:
        return dist.new_group(timeout=limit, backend="gloo", group_desc=description)
    return _group_within(process_group, sorted(members), description, limit)


def _group_within(parent: Any, members: list[int], description: str, limit: timedelta) -> Any:
    """Create a group that only its members create: the ranks of ``parent``, ascending.

    torch puts the number of this process's groups into the name of such a group. Members of which some are in more
    groups than others would wait for one another in vain, and no public function takes a name. So the name here comes
    from the parent's, and from how many groups it was given to before, which are the same on all members.
    """
    number = _groups_made.get(parent, 0)
    group = _named_group(members, f"ckptmirror:{parent.group_name}:{number}", description, limit)
    if group is None:
        return dist.new_group(
            members, timeout=limit, backend="gloo", use_local_synchronization=True, group_desc=description
        )
    _groups_made[parent] = number + 1
    return group


def _named_group(members: list[int], name: str, description: str, limit: timedelta, store: Any = None) -> Any:
    """Create a gloo group of this name that only its members create; None if this version of torch cannot.

    Args:
        members: Ranks of the job, ascending.
        name: The same on all of them, and new.
        description: For messages.
        limit: Of every wait.
        store: Where they find one another; None: the job's store.
    """
    create = getattr(distributed_c10d, "_new_process_group_helper", None)
    store_of_all = getattr(distributed_c10d, "_get_default_store", None)
    ranks_of_groups = getattr(getattr(distributed_c10d, "_world", None), "pg_group_ranks", None)
    takes = inspect.signature(create).parameters.keys() if create is not None else set()
    if create is None or store_of_all is None or ranks_of_groups is None or not {"timeout", "group_desc"} <= takes:
        return None
    own, backend = members.index(dist.get_rank()), dist.Backend("gloo")
    found = store if store is not None else store_of_all()
    group, _ = create(len(members), own, members, backend, found, name, timeout=limit, group_desc=description)
    ranks_of_groups[group] = {rank: at for at, rank in enumerate(members)}
    return group


def _store_of(group: Any) -> Any:
    """Return a separate connection to the group's store, or None. It only carries reasons."""
    try:
        store = group.get_group_store().clone()
        store.set_timeout(timedelta(seconds=_STORE_LIMIT_S))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return store


def _reason_in(store: Any, peer: int) -> str:
    """Return the reason that ``peer`` left in the store, or "" if it leaves none in a moment."""
    deadline = time.monotonic() + _REASON_LIMIT_S
    while time.monotonic() < deadline:
        if store.check([f"reason/{peer}"]):
            return str(store.get(f"reason/{peer}").decode())
        time.sleep(_REASON_POLL_S)
    return ""
