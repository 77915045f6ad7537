"""Requests to stop: signals to this process and to its group, chaining, grace, forks, and agreement between ranks."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmirror.core.errors import UsageError
from ckptmirror.ranks import SingleRank
from ckptmirror.ranks.dataloader_workers import WorkerShield
from ckptmirror.ranks.stop import StopRequest

LIMIT_S, GRACE_S = 60.0, 3600.0


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own process group to its end."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
        check=False,
    )


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    request = StopRequest(grace_s=GRACE_S)
    yield request
    request.uninstall()


def told(stop: StopRequest) -> threading.Event:
    event = threading.Event()
    stop.on_request.append(lambda _: event.set())
    return event


def test_a_signal_is_a_request_and_the_second_does_not_kill(stop: StopRequest) -> None:
    event = told(stop)
    assert (stop.requested, stop.reason, stop.remaining_s) == (False, None, math.inf)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert event.wait(LIMIT_S)
    first = stop.remaining_s
    assert (stop.requested, stop.reason) == (True, "SIGTERM")
    assert GRACE_S - LIMIT_S < first <= GRACE_S
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.remaining_s <= first


def test_grace_counts_from_the_first_signal_and_ends_at_zero() -> None:
    stop = StopRequest(grace_s=0.0)
    event = told(stop)
    with stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert event.wait(LIMIT_S)
        assert stop.remaining_s == 0.0


def test_earlier_handlers_and_the_earlier_wakeup_descriptor_still_get_the_signal() -> None:
    seen: list[int] = []
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(LIMIT_S)
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    before_fd = signal.set_wakeup_fd(theirs.fileno())
    try:
        stop = StopRequest()
        event = told(stop)
        stop.install([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert event.wait(LIMIT_S)
        assert seen == [signal.SIGUSR1]
        assert ours.recv(10) == bytes([signal.SIGUSR1])
        stop.uninstall()
        stop.uninstall()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] * 2
        assert ours.recv(10) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(theirs.fileno()) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(before_fd)
        signal.signal(signal.SIGUSR1, before)
        ours.close()
        theirs.close()


def test_two_requests_on_one_signal_both_know() -> None:
    outer, inner = StopRequest(), StopRequest()
    events = [told(outer), told(inner)]
    with outer, inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert all(event.wait(LIMIT_S) for event in events)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_taken_wakeup_descriptor_delays_the_request_but_does_not_lose_it(stop: StopRequest) -> None:
    event = told(stop)
    stop.install()
    signal.set_wakeup_fd(-1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert event.wait(LIMIT_S)


def test_the_program_can_ask_and_the_first_reason_stays(stop: StopRequest) -> None:
    event = told(stop)
    stop.request("loss is NaN")
    assert event.is_set()
    stop.install()
    stop.request("another")
    assert (stop.reason, stop.remaining_s) == ("loss is NaN", math.inf)


def test_a_callback_runs_once_on_the_watcher_and_its_error_is_kept(stop: StopRequest) -> None:
    threads: list[str] = []

    def fail(_: StopRequest) -> None:
        threads.append(threading.current_thread().name)
        raise OSError("the disk is full")

    stop.on_request.append(fail)
    event = told(stop)
    stop.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert event.wait(LIMIT_S)
    stop.request("again")
    stop.uninstall()
    assert threads == ["ckptmirror-stop"]
    assert [str(error) for error in stop.callback_errors] == ["the disk is full"]


def test_only_the_main_thread_installs(stop: StopRequest) -> None:
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            stop.install()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    stop.install()
    with pytest.raises(UsageError, match="already"):
        stop.install()


class Others(SingleRank):
    """A job whose other rank said something."""

    def __init__(self, said: object) -> None:
        self.said = said

    def exchange(self, value: Any, **_: Any) -> list[Any]:
        return [value, self.said]


def test_a_request_to_any_rank_stops_all_with_the_earliest_end() -> None:
    stop = StopRequest()
    event = told(stop)
    assert not stop.check(SingleRank())
    assert not stop.check(Others((None, math.inf)))
    assert not stop.requested
    assert stop.check(Others(("SIGTERM", GRACE_S)))
    assert event.is_set()
    assert stop.reason == "rank 1: SIGTERM"
    assert GRACE_S - LIMIT_S < stop.remaining_s <= GRACE_S
    assert stop.check(SingleRank())
    assert stop.check(Others((None, math.inf)))


def test_sigterm_during_long_step() -> None:
    """The main thread waits in C, where no Python handler runs, for a lock that is freed once the request is known."""
    done = run(
        """
        import ctypes, os, signal, threading
        from ckptmirror.ranks.stop import StopRequest
        libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(lock)
        told, left_s = threading.Event(), []
        stop = StopRequest(on_request=[lambda stop: left_s.append(stop.remaining_s), lambda _: told.set()]).install()
        def send():
            os.kill(os.getpid(), signal.SIGTERM)
            told.wait()
            libc.pthread_mutex_unlock(lock)
        threading.Thread(target=send).start()
        libc.pthread_mutex_lock(lock)
        left_s.append(stop.remaining_s)
        print(stop.reason, stop.grace_s >= left_s[0] > left_s[1])
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["SIGTERM", "True"]


def test_importing_it_imports_no_torch() -> None:
    program = """
        import sys
        import ckptmirror.ranks, ckptmirror.ranks.stop
        ranks = ckptmirror.ranks.open_ranks(node_key="a")
        print("torch" in sys.modules, type(ranks).__name__, ranks.exchange(3, what="x"))
        """
    assert run(program).stdout.split() == ["False", "SingleRank", "[3]"]


def test_a_forked_child_is_not_asked_and_dies_of_its_own_signal(stop: StopRequest) -> None:
    event = told(stop)
    stop.install()
    ready, child_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(child_ready, b"x")
        while True:
            signal.pause()
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(child_ready)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not stop.requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert event.wait(LIMIT_S)


WORKERS = """
    import os, signal, sys, torch
    from torch.utils.data import DataLoader, Dataset
    from ckptmirror.ranks.stop import StopRequest

    class Numbers(Dataset):
        def __len__(self): return 64
        def __getitem__(self, index): return index

    stop = StopRequest().install()
    shield = StopRequest.shield_workers() if sys.argv[-1] == "shield" else None
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_init_fn=shield)
    seen = 0
    for batch in loader:
        seen += len(batch)
        if seen == 8:
            os.killpg(0, signal.SIGTERM)
    print(seen, stop.reason)
    """


@pytest.mark.parametrize("shielded", [True, False])
def test_sigterm_to_process_group_with_workers(shielded: bool) -> None:
    try:
        done = run(f"import sys\nsys.argv.append({'shield' if shielded else 'bare'!r})\n" + textwrap.dedent(WORKERS))
    except subprocess.TimeoutExpired:
        assert not shielded, "shielded workers hung"
        return  # a loader whose workers were killed in the wrong moment waits for them: that is what the shield is for
    if shielded:
        assert done.stdout.split() == ["64", "SIGTERM"], done.stderr
        assert done.returncode == 0
    else:
        assert done.returncode == 1, "the workers were killed, so the next batch fails"
        assert "SIGTERM" not in done.stdout


ENDS = """
    import sys
    from torch.utils.data import DataLoader
    from ckptmirror.ranks.dataloader_workers import WorkerShield

    if __name__ == "__main__":
        shield = WorkerShield(grace_s=3600.0)
        print(shield._ends)
        loader = DataLoader(
            range(64), num_workers=2, worker_init_fn=shield, persistent_workers=True,
            multiprocessing_context=sys.argv[1],
        )
        for batch in loader:
            if batch == 8:
                raise ValueError("an error of the training")
    """


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_trainer_does_not_wait_for_its_shielded_workers_when_it_ends(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(ENDS))
    done = subprocess.run([sys.executable, script, how], capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "an error of the training" in done.stderr
    assert not Path(done.stdout.strip()).exists()


FORK_SERVER = """
    import multiprocessing
    import os
    import signal
    import sys
    from torch.utils.data import DataLoader
    from ckptmirror.ranks.stop import StopRequest

    def train():
        shield = StopRequest.shield_workers()
        print(len(list(DataLoader(range(8), num_workers=2, worker_init_fn=shield, multiprocessing_context="fork"))))

    if __name__ == "__main__":
        context = multiprocessing.get_context("forkserver")
        if sys.argv[1] == "trainer":
            trainer = context.Process(target=train)
            trainer.start()
            trainer.join()
            sys.exit()
        if sys.argv[1] == "late":
            first = context.Process(target=print)
            first.start()
            first.join()
        stop = StopRequest().install()
        shield = StopRequest.shield_workers()
        bare = context.Process(target=signal.pause, daemon=True)
        bare.start()
        seen = 0
        for batch in DataLoader(range(64), num_workers=2, worker_init_fn=shield, multiprocessing_context=context):
            seen += 1
            if seen == 4:
                os.killpg(0, signal.SIGTERM)
                bare.join()
        print(seen, stop.reason, bare.exitcode)
    """


@pytest.mark.parametrize("when", ["first", "late", "trainer"])
def test_sigterm_to_process_group_with_workers_of_a_fork_server(when: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(FORK_SERVER))
    command = [sys.executable, script, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, start_new_session=True)
    if when == "first":
        assert done.stdout.split() == ["64", "SIGTERM", str(-signal.SIGTERM)], done.stderr
    elif when == "trainer":  # it is of a fork server, and its workers are not
        assert (done.stdout.split(), done.stderr) == (["8"], "")
    else:
        assert "which does not know of shield_workers()" in done.stderr


def test_a_shielded_worker_ends_after_its_grace_and_runs_the_users_own_start() -> None:
    shield = pickle.loads(pickle.dumps(WorkerShield(print, grace_s=0.2)))
    ready, child_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(child_ready, 1)
        shield(7)
        os.write(child_ready, b"x")
        while True:
            time.sleep(60)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(child_ready)
    started = time.monotonic()
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert time.monotonic() - started > 0.15
