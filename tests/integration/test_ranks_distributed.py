"""Real processes with gloo: what ranks see when one of them fails, dies, is late or does something else."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ckptmirror.core.errors import LocalStorageFull, RankFailed, UsageError
from ckptmirror.local.root_probe import RootProbe
from ckptmirror.ranks import StopRequest, gloo, open_ranks
from ckptmirror.ranks.base import gather_result
from tests.kit.processes import outcome, run_ranks

pytestmark = pytest.mark.long


def _layout(rank: int) -> Any:
    ranks = open_ranks(node_key="ab"[rank % 2], timeout_s=60)
    place = (ranks.rank, ranks.world_size, ranks.node, ranks.nodes, ranks.local_rank, ranks.local_world_size)
    other = ranks.channel("second")
    big = other.exchange(bytes([rank]) * 3_000_000, what="three megabytes")
    said = (place, ranks.is_leader, [len(b) for b in big], [b[0] for b in big], other.node == ranks.node)
    second = torch.full((2,), float(rank))
    dist.all_reduce(second, group=other.torch_group)
    other.close()
    again = ranks.exchange({"rank": rank}, what="after the other channel closed")
    ranks.close()
    ranks.close()
    return said, second.tolist(), again


def test_ranks_that_share_a_root_are_one_node_and_values_come_by_rank() -> None:
    results = run_ranks(3, _layout)
    assert [r[0][0] for r in results] == [(0, 3, 0, 2, 0, 2), (1, 3, 1, 2, 0, 1), (2, 3, 0, 2, 1, 2)]
    assert [r[0][1] for r in results] == [True, True, False]
    for said, total, again in results:
        assert said[2:] == ([3_000_000] * 3, [0, 1, 2], True)
        assert total == [3.0, 3.0]
        assert again == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def _probe(rank: int, base: Path) -> tuple[str, str, int]:
    probe = RootProbe(base / "ab"[rank])
    return outcome(lambda: open_ranks(node_key="ab"[rank], probe=probe, timeout_s=60).close())


def test_a_root_that_takes_no_token_is_named_with_its_host(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    (tmp_path / "b").mkdir()
    (_, here, _), (_, there, _) = run_ranks(2, _probe, tmp_path)
    assert here.startswith(f"rank 0 on host {os.uname().nodename}: ")
    assert there.startswith(f"find out who shares a root: rank 0 on host {os.uname().nodename}: ")


_made: list[int] = []


class _Large:
    """Something of which only rank 0 wants to hold several."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, int]) -> None:
        self.rank = state["rank"]
        _made.append(self.rank)


def _collects(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    found = gather_result(ranks, lambda: _Large(rank), what="collect", to="first")
    ranks.close()
    return [one.rank for one in found.values()], _made


def test_what_only_the_first_rank_needs_becomes_objects_there_alone() -> None:
    """What the disks of all nodes hold may be gigabytes, and a host has several ranks."""
    assert run_ranks(3, _collects) == [([0, 1, 2], [0, 1, 2]), ([], []), ([], [])]


def _one_fails(rank: int, who: tuple[int, ...]) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    error = LocalStorageFull("/local-ssd is full", hint="free it") if rank in who else None
    first = outcome(lambda: ranks.exchange("x", what="report artifacts of step 200", error=error))
    second = outcome(lambda: ranks.exchange(rank, what="the next exchange"))
    ranks.close()
    return first, second


@pytest.mark.parametrize("who", [(0,), (1,), (1, 2)])
def test_one_rank_error_strands_nobody(who: tuple[int, ...]) -> None:
    for rank, (first, second) in enumerate(run_ranks(3, _one_fails, who)):
        kind, message, exit_code = first
        assert exit_code == 5
        assert "/local-ssd is full" in message
        assert kind == ("LocalStorageFull" if rank in who else "RankFailed")
        if rank not in who:
            assert message.startswith("report artifacts of step 200: ")
            assert all(f"rank {failed} failed" in message for failed in who)
        assert second[:2] == ("value", "[0, 1, 2]")


def _unsendable(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    value = threading.Lock() if rank == 1 else 7
    foreign = OSError(5, "Input/output error") if rank == 0 else None
    said = outcome(lambda: ranks.exchange(value, what="send it", error=foreign))
    ranks.close()
    return said


def test_a_value_that_cannot_be_sent_is_that_ranks_error() -> None:
    first, second, third = run_ranks(3, _unsendable)
    assert first[0] == "OSError"
    assert second[0] == "UsageError"
    assert third[0] == "RankFailed"
    assert "rank 0 failed: OSError" in third[1]
    assert "rank 1 failed: a lock cannot be sent" in third[1]


def _cannot_read(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=20)
    if rank == 1:
        with suppress(RankFailed):  # rank 0 is about to end
            ranks.exchange(rank, what="report artifacts of step 200")
        return None

    def loads(_: bytes) -> Any:
        raise RuntimeError("Numpy is not available")

    gloo.pickle = SimpleNamespace(loads=loads, dumps=pickle.dumps, HIGHEST_PROTOCOL=pickle.HIGHEST_PROTOCOL)  # type: ignore[assignment]  # breaks reading
    try:
        ranks.exchange(rank, what="report artifacts of step 200")
    except RuntimeError as error:
        return str(error)
    finally:
        ranks.close()


def test_an_error_of_this_rank_is_not_told_as_the_death_of_another() -> None:
    assert run_ranks(2, _cannot_read)[0] == "Numpy is not available"


def test_ranks_need_no_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('this environment has no NumPy')")
    code = """if True:
        import torch.distributed as dist
        from ckptmirror.ranks import open_ranks

        dist.init_process_group("gloo")
        ranks = open_ranks(node_key="a", timeout_s=60)
        assert [len(x) for x in ranks.exchange(bytes(100_000), what="more than fits in a frame")] == [100_000] * 2
        ranks.close()
        dist.destroy_process_group()
    """
    (tmp_path / "job.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _one_dies(rank: int, who: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    first = outcome(lambda: ranks.exchange(rank, what="vote"))
    return first, outcome(lambda: ranks.exchange(rank, what="vote again"))


@pytest.mark.parametrize("who", [0, 2])
def test_a_killed_rank_frees_the_others_promptly(who: int) -> None:
    for rank, result in enumerate(run_ranks(4, _one_dies, who, dead=(who,), store_in_rank_0=True)):
        if rank == who:
            continue
        first, second = result
        assert first[0] == second[0] == "RankFailed"
        assert f"rank {who} is gone" in first[1]


def _one_is_dead_before(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=40)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):  # this rank knows of it before the exchange begins
        ranks.torch_group.recv([torch.zeros(1)], 2, 0).wait()
    return outcome(lambda: ranks.exchange(rank, what="vote"))


def test_a_rank_that_died_before_the_exchange_is_named_to_all_others() -> None:
    for result in run_ranks(4, _one_is_dead_before, dead=(2,), store_in_rank_0=True):
        assert result is None or (result[0] == "RankFailed" and "rank 2 is gone" in result[1]), result


def _fails_as_one_is_dead(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=40)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failure: RuntimeError | None = None
    try:
        ranks.torch_group.recv([torch.zeros(1)], 1, 0).wait()
    except RuntimeError as error:
        failure = error
    return outcome(lambda: ranks.exchange(rank, what="report the files of step 200", error=failure))


def test_a_collective_that_fails_because_a_rank_is_gone_is_told_as_that() -> None:
    """Of gloo's own error, which names a port, nobody can tell which rank it was."""
    for rank, result in enumerate(run_ranks(3, _fails_as_one_is_dead, dead=(1,), store_in_rank_0=True)):
        assert rank == 1 or (result[0] == "RankFailed" and "rank 1 is gone" in result[1]), result


class _Work:
    """What gloo waits for: it notes the limit, and fails as gloo does when that is over."""

    def wait(self, limit: timedelta) -> None:
        self.limit = limit


def test_a_wait_is_never_cut_off_before_its_deadline() -> None:
    """A wait that ends a fraction of a millisecond early would be told as the death of a rank."""
    for left_s in (0.0, 0.0001, 0.0019, 1.2345678, 5.9999):
        work, before = _Work(), time.monotonic()
        gloo._wait(work, before + left_s)
        assert work.limit >= timedelta(milliseconds=1)
        assert work.limit.microseconds % 1000 == 0
        assert time.monotonic() + work.limit.total_seconds() >= before + left_s


def _one_is_late(rank: int, who: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=2)
    waited = ("", "", 0)
    if rank != who:
        waited = outcome(lambda: ranks.exchange(rank, what="commit step 200"))
    dist.barrier()
    after = outcome(lambda: ranks.exchange(rank, what="commit step 300"))
    ranks.close()
    return waited, after


@pytest.mark.parametrize("who", [0, 1])
def test_every_wait_has_a_limit_and_names_the_rank_that_did_not_come(who: int) -> None:
    for rank, (waited, after) in enumerate(run_ranks(3, _one_is_late, who)):
        if rank == who:
            assert after[0] in ("WaitTimeout", "RankFailed")
            continue
        assert waited[0] == "WaitTimeout"
        assert f"rank {who} did not" in waited[1]
        assert waited[1].count("commit step 200") == 1
        assert after[0] == "WaitTimeout"
        assert "broke before" in after[1]


def _in_turn(rank: int) -> Any:
    """Rank 1 waits for rank 0, which sends once a wait with the usual limit would have been over."""
    ranks = open_ranks(node_key="ab"[rank], timeout_s=2)
    usual, patient = ranks.channel("usual"), ranks.channel("files", more_s=60)
    assert (ranks.timeout_s, usual.timeout_s, patient.timeout_s) == (2, 2, 62)
    piece = bytearray(b"late" if rank == 0 else bytes(4))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["over"])
        patient.send(memoryview(piece), 1)
        return bytes(piece), ""
    received = threading.Thread(target=patient.receive, args=(memoryview(piece), 0))
    received.start()
    kind, _, _ = outcome(lambda: usual.receive(memoryview(bytearray(4)), 0))
    store.set("over", "")
    received.join(60)
    return bytes(piece), kind


def test_a_rank_whose_turn_comes_late_waits_as_long_as_its_channel_says() -> None:
    assert run_ranks(2, _in_turn) == [(b"late", ""), (b"late", "RankFailed")]


def _elsewhere(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    return outcome(lambda: ranks.exchange(rank, what="rotate" if rank == 1 else "save step 9"))


def test_two_exchanges_are_never_taken_for_one_another() -> None:
    for kind, message, _ in run_ranks(2, _elsewhere):
        assert kind == "RankFailed"
        assert "'save step 9'" in message
        assert "'rotate'" in message


def _background(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    background = ranks.channel("background")
    dist.barrier()
    group: Any = dist.group.WORLD
    counted = group._get_sequence_number_for_group()
    said: list[Any] = []
    finished = threading.Event()

    def save() -> None:
        for step in range(20):
            said.append(background.exchange((rank, step), what=f"report step {step}"))
        dist.all_gather_object([None, None], rank, group=background.torch_group)
        finished.set()

    total = torch.ones(3)
    work = dist.all_reduce(total, async_op=True) if rank == 0 else None  # hangs: rank 1 has not come
    thread = threading.Thread(target=save)
    thread.start()
    in_time = finished.wait(30)
    still_hanging = work is None or not work.is_completed()
    used = group._get_sequence_number_for_group() - counted
    ranks.exchange(None, what="both have looked")
    if rank == 1:
        work = dist.all_reduce(total, async_op=True)
    assert work is not None
    work.wait()
    thread.join()
    background.close()
    ranks.close()
    return in_time, still_hanging, used, total.tolist(), said[-1]


def test_background_thread_issues_no_collective_on_training_group() -> None:
    first, second = run_ranks(2, _background)
    for in_time, still_hanging, _, total, last in (first, second):
        assert in_time, "the background waited for the training's collective"
        assert still_hanging
        assert total == [2.0] * 3
        assert last == [(0, 19), (1, 19)]
    assert (first[2], second[2]) == (1, 0), "rank 0 began one collective itself; nothing else was sent"


def _vote(rank: int) -> Any:
    ranks = open_ranks(node_key=str(rank), timeout_s=60)
    whole = {0: {100, 200, 300}, 1: {100, 200}, 2: {100, 200, 300}}[rank]
    votes = ranks.exchange(whole, what="vote on the save to resume from")
    ranks.close()
    return max(set.intersection(*votes))


def test_resume_choice_is_one_vote() -> None:
    assert run_ranks(3, _vote) == [200, 200, 200]


def _two_threads(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    seen: list[Any] = []
    if rank == 1:
        go = ranks.channel("go")
        thread = threading.Thread(target=lambda: seen.append(outcome(lambda: ranks.exchange(1, what="first"))))
        thread.start()
        while not ranks._busy.locked():  # type: ignore[attr-defined]
            time.sleep(0)
        seen.append(outcome(lambda: ranks.exchange(1, what="second")))
        go.exchange(1, what="go")
        thread.join()
    else:
        go = ranks.channel("go")
        go.exchange(0, what="go")
        ranks.exchange(0, what="first")
    return [entry[:2] for entry in seen]


def test_a_channel_in_use_by_another_thread_is_refused() -> None:
    _, (refused, first) = run_ranks(2, _two_threads)
    assert refused[0] == UsageError.__name__
    assert first == ("value", "[0, 1]")


def _gathers(rank: int) -> Any:
    ranks = open_ranks(node_key="ab"[rank % 2], timeout_s=60)
    background = ranks.channel("background")
    value = bytes([rank]) * 10_000  # more than fits in a frame
    on_node = background.gather(value, what="report to the node", to="node")
    at_first = ranks.gather(rank, what="report to the first", to="first")
    error = LocalStorageFull("full") if rank == 3 else None
    failed = outcome(lambda: ranks.gather(rank, what="report to the first", to="first", error=error))[0]
    after = ranks.exchange(rank, what="go on")
    return {of: (set(data), len(data)) for of, data in on_node.items()}, at_first, failed, after


def test_a_gather_sends_a_value_to_the_ranks_of_its_node_or_to_the_first_and_an_error_to_all() -> None:
    for rank, (on_node, at_first, failed, after) in enumerate(run_ranks(4, _gathers)):
        read = range(4) if rank == 0 else range(rank % 2, 4, 2)
        assert on_node == {of: ({of}, 10_000) for of in read}
        assert at_first == (dict(enumerate(range(4))) if rank == 0 else {})
        assert failed == ("LocalStorageFull" if rank == 3 else "RankFailed")
        assert after == [0, 1, 2, 3]


def _subset(rank: int) -> Any:
    pair = dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        return outcome(lambda: open_ranks(pair, node_key="a", timeout_s=60))[0]
    ranks = open_ranks(pair, node_key="a", timeout_s=60)
    said = ranks.rank, ranks.world_size, ranks.exchange(rank, what="who")
    ranks.close()
    return said


def test_a_group_of_some_ranks_talks_among_itself() -> None:
    assert run_ranks(3, _subset) == ["UsageError", (0, 2, [1, 2]), (1, 2, [1, 2])]


def _leaves(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    ranks.exchange(rank, what="the last words")
    ranks.close()
    return outcome(lambda: ranks.exchange(rank, what="after the end"))[:2]


def test_close_needs_no_other_rank_and_no_barrier() -> None:
    for _ in range(2):
        for kind, message in run_ranks(3, _leaves):
            assert kind == UsageError.__name__
            assert "after the end: the manager of these ranks is closed" in message


def _within_a_group(rank: int, names_groups: bool) -> Any:
    given = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    for _ in range(rank if names_groups else 0):
        dist.new_group([rank], use_local_synchronization=True)
    helper = distributed_c10d._new_process_group_helper
    if not names_groups:
        distributed_c10d._new_process_group_helper = lambda *given, **more: helper(*given, **more)
    said = []
    for _ in range(2 if names_groups else 1):
        ranks = open_ranks(given, node_key="a", timeout_s=20)
        other = ranks.channel("second")
        total = torch.full((1,), float(rank))
        dist.all_reduce(total, group=other.torch_group)
        said.append((other.exchange(rank, what="who is there"), total.item()))
        other.close()
        ranks.close()
    return said


@pytest.mark.parametrize("names_groups", [True, False])
def test_ranks_of_which_some_are_in_more_groups_than_others_find_one_another(names_groups: bool) -> None:
    """Twice: a second time the name is another one. Where torch takes no name, all must be in as many groups."""
    times = 2 if names_groups else 1
    found = run_ranks(4, _within_a_group, names_groups)
    assert found == [[([rank, 3 - rank], 3.0)] * times for rank in (0, 1, 1, 0)]


def _never_opens(rank: int) -> Any:
    if rank == 1:
        return None
    return outcome(lambda: open_ranks(node_key="a", timeout_s=2))


def _renews(rank: int) -> Any:
    """A collective of ranks 0 and 2 fails on rank 2 alone; ranks are in different numbers of groups."""
    for other in (0, 1):
        dist.new_group([other], use_local_synchronization=True) if rank == other else None
    members = [0, 2]
    group = dist.new_group(members)
    if rank not in members:
        return None
    ranks = open_ranks(group, node_key="a", timeout_s=60).channel("save")
    failure: RuntimeError | None = None
    try:
        if rank == 2:
            ranks.torch_group.recv([torch.zeros(1)], 0, 0).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        failure = error
    kind, _, _ = outcome(lambda: ranks.exchange(None, what="save step 1", error=failure)) if rank == 0 else ("", "", 0)
    if rank == 2:
        with pytest.raises(RuntimeError, match="Timed out"):
            ranks.exchange(None, what="save step 1", error=failure)
    lost = ranks.exchange(ranks.lost_torch_group, what="save step 2")
    totals = []
    for _ in range(2):
        ranks.renew_torch_group()
        total = torch.ones(1) + rank
        dist.all_reduce(total, group=ranks.torch_group)
        totals.append(total.item())
    found = kind, lost, totals, ranks.lost_torch_group
    ranks.close()
    return found


def test_ranks_renew_together_the_group_in_which_a_collective_of_one_failed() -> None:
    first, _, second = run_ranks(3, _renews)
    assert first == ("RankFailed", [False, True], [4.0, 4.0], False)
    assert second == ("", [False, True], [4.0, 4.0], False)


def test_opening_has_a_limit_too() -> None:
    kind, message, _ = run_ranks(2, _never_opens)[0]
    assert kind == "WaitTimeout"
    assert "not all ranks came within 2 s (rank 1 did not)" in message


class _Published(dist.Store):
    """A store in which gloo publishes an address; ``then`` is called once that is there, before gloo connects."""

    def __init__(self, store: dist.Store, then: Callable[[dist.Store, str], object]) -> None:
        super().__init__()
        self.store, self.then = store, then

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)
        self.then(self.store, key)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.store.wait(keys, limit)


def _as_it_connects(rank: int, who: int, then: Callable[[dist.Store, str], object] | None) -> None:
    """Let ``then`` be called on rank ``who`` as in :class:`_Published`. gloo waits for hours for its connection."""
    gloo_of_torch = distributed_c10d.ProcessGroupGloo

    class Gloo(gloo_of_torch):
        def __init__(self, store: dist.Store, rank_in_group: int, size: int, **_: Any) -> None:
            options = gloo_of_torch._Options()
            host = "127.255.255.254" if rank == who else "127.0.0.1"  # of two ranks, the higher address connects
            lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"
            options._devices = [gloo_of_torch.create_device(hostname=host, lazy_init=lazy)]
            options._timeout = timedelta(hours=1)
            seen = _Published(store, then) if then is not None and rank == who else store
            super().__init__(seen, rank_in_group, size, options)

    distributed_c10d.ProcessGroupGloo = Gloo


def _pids() -> list[Any]:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def _struck_as_it_connects(rank: int, strike: signal.Signals) -> Any:
    pids = _pids()
    _as_it_connects(rank, 2, lambda *_: os.kill(os.getpid(), strike))
    said = outcome(lambda: open_ranks(node_key="a", timeout_s=1))
    if rank == 0 and strike == signal.SIGSTOP:
        os.kill(pids[2], signal.SIGKILL)
    return said


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_opening_has_a_limit_if_a_rank_dies_or_is_stopped_as_it_connects(strike: signal.Signals) -> None:
    for kind, message, _ in run_ranks(3, _struck_as_it_connects, strike, dead=(2,))[:2]:
        assert kind == "WaitTimeout"
        assert "not all ranks came within 1 s (a rank, or the host of torch's store, does not answer)" in message


def _struck_before_it_meets_others(rank: int, who: int) -> Any:
    pids = _pids()
    _as_it_connects(rank, who, None)
    create = gloo._groups_and_store

    def create_and_stop(*given: Any) -> Any:
        created = create(*given)
        os.kill(os.getpid(), signal.SIGSTOP)
        return created

    if rank == who:
        gloo._groups_and_store = create_and_stop
    said = outcome(lambda: open_ranks(node_key="a", timeout_s=1))
    if rank == 1:
        os.kill(pids[who], signal.SIGKILL)
    return said


@pytest.mark.parametrize("who", [0, 2])
def test_the_first_exchange_has_a_limit_where_gloo_connects_in_it(who: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    found = run_ranks(3, _struck_before_it_meets_others, who, dead=(who,))
    assert [said[0] for rank, said in enumerate(found) if rank != who] == ["WaitTimeout"] * 2, found


def _struck_before_it_sends(rank: int) -> Any:
    pids = _pids()
    _as_it_connects(rank, 2, None)
    ranks = open_ranks(node_key="a", timeout_s=1)
    dist.barrier()
    if rank == 0:
        return None
    if rank == 2:
        signal.pause()
    os.kill(pids[2], signal.SIGSTOP)
    said = outcome(lambda: ranks.receive(memoryview(bytearray(4)), 2))
    ranks.close()
    os.kill(pids[2], signal.SIGKILL)
    return said


def test_the_first_piece_of_a_file_has_a_limit_where_gloo_connects_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    kind, message, _ = run_ranks(3, _struck_before_it_sends, dead=(2,))[1]
    assert kind == "RankFailed"
    assert "rank 2 is gone" in message


def _continues_late(rank: int) -> Any:
    pids, pair = _pids(), dist.new_group([0, 1])
    before, strikes = len(distributed_c10d._world.pg_map), [signal.SIGSTOP]
    _as_it_connects(rank, 2, lambda *_: strikes and os.kill(os.getpid(), strikes.pop()))
    kind, _, _ = outcome(lambda: open_ranks(node_key="a", timeout_s=1))
    if rank != 2:
        dist.barrier(pair)
    if rank == 0:
        os.kill(pids[2], signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "ckptmirror-connect":
            thread.join()
    return kind, len(distributed_c10d._world.pg_map) - before


def test_groups_that_are_complete_after_the_limit_are_destroyed() -> None:
    found = run_ranks(3, _continues_late)
    assert found[:2] == [("WaitTimeout", 0)] * 2
    assert found[2][1] == 0


def _is_interrupted(rank: int) -> Any:
    pids = _pids()

    def interrupt(store: dist.Store, key: str) -> None:
        store.get(f"{key[:-1]}0")  # rank 0 is in gloo then
        os.kill(pids[0], signal.SIGINT)
        signal.pause()

    _as_it_connects(rank, 1, interrupt)
    try:
        open_ranks(node_key="a", timeout_s=3600)
    except KeyboardInterrupt:
        os.kill(pids[1], signal.SIGKILL)
        return "interrupted"


def test_ctrl_c_ends_the_wait_for_a_rank_that_does_not_connect() -> None:
    assert run_ranks(2, _is_interrupted, dead=(1,))[0] == "interrupted"


def _hosts_the_store(rank: int, does: str) -> Any:
    """Rank 0 hosts the store, and is stopped."""
    pids = _pids()
    ranks = open_ranks(node_key="a", timeout_s=1) if does != "open" else None
    dist.barrier()
    if rank == 0:
        signal.pause()
    os.kill(pids[0], signal.SIGSTOP)
    if ranks is None:
        said = outcome(lambda: open_ranks(node_key="a", timeout_s=1))
    elif does == "renew":
        ranks._refuse_if_gone = lambda *_: None  # type: ignore[method-assign]  # which would notice it first
        said = outcome(ranks.renew_torch_group)
    else:
        said = outcome(lambda: ranks.receive(memoryview(bytearray(4)), 0))
        ranks.close()
    os.kill(pids[0], signal.SIGKILL)
    return said


@pytest.mark.parametrize(
    ("does", "kind", "expected"),
    [
        ("open", "WaitTimeout", "not all ranks came within 1 s"),
        ("renew", "WaitTimeout", "not all ranks connected again within 1 s"),
        ("receive", "RankFailed", "rank 0 is gone"),
    ],
)
def test_every_wait_has_a_limit_if_the_rank_that_hosts_the_store_is_stopped(
    does: str, kind: str, expected: str
) -> None:
    said = run_ranks(2, _hosts_the_store, does, dead=(0,), store_in_rank_0=True)[1]
    assert said[0] == kind
    assert expected in said[1]


def _destroyed_before(rank: int, close: bool) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60)
    said = ranks.exchange(rank, what="hello")
    dist.barrier()
    dist.destroy_process_group()
    if close:
        ranks.close()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness to destroy
    return said


@pytest.mark.parametrize("close", [True, False])
def test_a_training_that_destroyed_its_groups_first_does_no_harm(close: bool) -> None:
    assert run_ranks(2, _destroyed_before, close) == [[0, 1], [0, 1]]


def _sharded(rank: int, directory: str) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ckptmirror.ranks.host_copy import HostCopier

    torch.manual_seed(1)
    model = torch.nn.Linear(7, 5)  # 5 rows on 2 ranks: uneven shards
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    ranks = open_ranks(node_key="a", timeout_s=60).channel("background")
    lease = HostCopier().copy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the training goes on
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None  # and hangs
    errors: list[BaseException] = []

    def save() -> None:
        try:
            dcp.save(lease.tree, checkpoint_id=directory, process_group=ranks.torch_group)
        except (Exception, dcp.api.CheckpointException) as error:  # noqa: BLE001  shown by the assertion below
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join(30)
    saved_while_training_hung = not thread.is_alive() and not errors
    ranks.exchange(None, what="both have looked")
    if rank == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    work.wait()
    loaded = model.state_dict()
    dcp.load(loaded, checkpoint_id=directory)
    equal = all(torch.equal(value.full_tensor(), expected[name]) for name, value in loaded.items())
    dist.barrier()
    return saved_while_training_hung, equal


def test_a_sharded_host_copy_is_saved_in_the_background_as_it_was(tmp_path: Path) -> None:
    assert run_ranks(2, _sharded, str(tmp_path / "dcp")) == [(True, True)] * 2


def _steps(rank: int) -> Any:
    ranks = open_ranks(node_key="a", timeout_s=60).channel("stop")
    stop = StopRequest().install()
    for step in range(1000):
        if rank == 1 and step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.check(ranks):
            stop.uninstall()
            return step, stop.reason, stop.remaining_s > 0
    return None


def test_a_signal_to_one_rank_stops_all_ranks_at_the_same_step() -> None:
    first, second = run_ranks(2, _steps)
    assert first[0] == second[0] >= 7
    assert first[1:] == ("rank 1: SIGTERM", True)
    assert second[1:] == ("SIGTERM", True)
