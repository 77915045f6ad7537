"""What one exchange makes of every rank's report, and the error that the others raise."""

from __future__ import annotations

import os
import pickle
import threading
from types import SimpleNamespace

import pytest

from ckptmirror.core.errors import (
    CkptMirrorError,
    LocalStorageFull,
    RankFailed,
    StorePermanent,
    UsageError,
    WaitTimeout,
)
from ckptmirror.ranks import SingleRank, node_key_of, open_ranks
from ckptmirror.ranks.messages import Answer, Report, decide, failure_of, pack_value, refusal


def report(value: object = None, error: BaseException | None = None, *, number: int = 1, what: str = "save") -> Report:
    return Report(number, what, pickle.dumps(value), failure_of(error) if error is not None else None)


def test_values_come_by_rank() -> None:
    answer = decide([report("a"), report("b")])
    assert answer.outcome == "values"
    assert answer.values() == {0: "a", 1: "b"}


def test_values_that_ranks_in_a_row_send_alike_travel_once() -> None:
    answer = decide([report("plan"), *[report("same")] * 7000])
    assert answer.values() == {0: "plan", **dict.fromkeys(range(1, 7001), "same")}
    assert len(pickle.dumps(answer)) < 300
    apart = decide(
        [report(rank % 2) for rank in range(200)]
    )  # the leaders of many nodes say one thing, the others another
    assert list(apart.values().values()) == [0, 1] * 100
    assert len(pickle.dumps(apart)) < 200 * 20


def test_an_answer_for_some_ranks_has_only_their_values() -> None:
    reports = [report("x" * rank) for rank in range(1000)]
    assert Answer.with_values(reports, (3, 4, 9)).values() == {3: "xxx", 4: "xxxx", 9: "xxxxxxxxx"}
    assert len(pickle.dumps(Answer.with_values(reports, (3, 4, 9)))) < 300


def test_one_error_refuses_for_all_and_names_the_rank() -> None:
    answer = decide([report(), report(error=LocalStorageFull("no space")), report()])
    error = refusal(answer, "commit step 200")
    assert type(error) is RankFailed
    assert error.message == "commit step 200: rank 1 failed: no space"
    on_nodes = refusal(answer, "commit step 200", (0, 2, 1))
    assert on_nodes.message == "commit step 200: rank 1 on node 2 failed: no space"


def test_one_kind_of_error_keeps_its_exit_code_and_hint() -> None:
    same = decide([report(error=LocalStorageFull("x", hint="free some")), report(error=LocalStorageFull("y"))])
    error = refusal(same, "save")
    assert (error.exit_code, error.temporary, error.hint) == (5, True, "free some")
    mixed = decide([report(error=LocalStorageFull("x")), report(error=StorePermanent("y"))])
    assert (refusal(mixed, "save").exit_code, refusal(mixed, "save").temporary) == (1, False)
    assert RankFailed.exit_code == 1


def test_an_error_of_a_foreign_kind_is_named() -> None:
    error = refusal(decide([report(error=KeyError("w")), report(error=KeyboardInterrupt())]), "save")
    assert "rank 0 failed: KeyError: 'w'" in error.message
    assert "rank 1 failed: KeyboardInterrupt" in error.message


def test_a_crowd_of_errors_is_cut_short() -> None:
    error = refusal(decide([report(error=OSError("z" * 9000)) for _ in range(50)]), "save")
    assert error.message.endswith("and 42 more ranks")
    assert len(error.message) < 40_000


def test_an_exchange_about_something_else_is_a_mix_up_that_names_both() -> None:
    error = refusal(decide([report(what="save step 9"), report(what="rotate")]), "save step 9")
    assert "'save step 9'" in error.message
    assert "'rotate'" in error.message
    assert decide([report(number=1), report(number=2)]).outcome == "mixed"


def test_a_late_answer_is_a_wait_timeout() -> None:
    error = refusal(Answer("late", reason="rank 1 did not come"), "save")
    assert type(error) is WaitTimeout
    assert error.hint.startswith("Start the job again: it continues from its newest save. If a rank is only slow")


def test_a_value_that_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="a lock cannot be sent"):
        pack_value(threading.Lock())
    monkeypatch.setattr("ckptmirror.ranks.messages.MAX_VALUE_BYTES", 100)
    with pytest.raises(UsageError, match="too large"):
        pack_value(b"x" * 101)


def test_a_single_rank_answers_itself() -> None:
    ranks = open_ranks(node_key="x")
    assert isinstance(ranks, SingleRank)
    channel = ranks.channel("background")
    assert channel.exchange(4, what="anything") == [4]
    assert (channel.rank, channel.world_size, channel.is_leader, channel.torch_group) == (0, 1, True, None)
    mine = CkptMirrorError("mine")
    with pytest.raises(CkptMirrorError) as caught:
        channel.exchange(4, what="anything", error=mine)
    assert caught.value is mine
    channel.close()


def test_a_root_has_one_node_key_by_whatever_path_and_another_on_another_host(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)
    key = node_key_of(root)
    assert node_key_of(root + "/.") == key
    assert node_key_of("/") != key
    other = SimpleNamespace(nodename=f"not {os.uname().nodename}")  # of the same boot, by an image of its memory
    monkeypatch.setattr(os, "uname", lambda: other)
    assert node_key_of(root) != key
