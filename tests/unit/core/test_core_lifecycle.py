"""The life of an upload record: only the transitions that are drawn exist."""

from __future__ import annotations

import itertools

import pytest

from ckptmirror.core.errors import IllegalTransition
from ckptmirror.core.lifecycle import TRANSITIONS, RecordState, can_go, check_transition, state_diagram

PAIRS = list(itertools.product(RecordState, RecordState))


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_only_listed_transitions_pass(old: RecordState, new: RecordState) -> None:
    if (old, new) in TRANSITIONS:
        check_transition(old, new)
        assert can_go(old, new)
    else:
        assert not can_go(old, new)
        with pytest.raises(IllegalTransition, match=f"{old.value} cannot become {new.value}"):
            check_transition(old, new)


def test_the_only_way_to_verified_is_through_uploading() -> None:
    assert [old for old, new in TRANSITIONS if new is RecordState.VERIFIED] == [RecordState.UPLOADING]


def test_removed_is_final_and_reached_from_every_other_state() -> None:
    assert not [new for old, new in TRANSITIONS if old is RecordState.REMOVED]
    others = set(RecordState) - {RecordState.REMOVED}
    assert {old for old, new in TRANSITIONS if new is RecordState.REMOVED} == others


def test_every_state_is_reached_and_no_state_goes_to_itself() -> None:
    assert {new for _, new in TRANSITIONS} == set(RecordState)
    assert all(old is not new for old, new in TRANSITIONS)
    assert all(reason.endswith(".") for reason in TRANSITIONS.values())


def test_the_diagram_draws_every_transition_once() -> None:
    lines = state_diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    for old, new in TRANSITIONS:
        assert len([line for line in lines if line.startswith(f"    {old.value} --> {new.value}: ")]) == 1
    assert len(lines) == len(TRANSITIONS) + 3
    assert ";" not in state_diagram()
    assert state_diagram() == state_diagram()
