"""Which starts count against the save that they continued from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from ckptmirror.core.start.evidence import Voice
from ckptmirror.core.start.quarantine import quarantined, why_quarantined
from tests.unit.core.start.builders import HERE, THERE, By, by

REPORTED = frozenset({Voice.CLAIMED, Voice.REPORTED})
DIVERGED, ENDED, SAVED = (REPORTED | {voice} for voice in (Voice.DIVERGED, Voice.ENDED, Voice.SAVED))
SILENT = frozenset({Voice.CLAIMED})

a = by("a", 0)
a100, a200 = a.save(100), a.save(200)
starts = [by(f"start {number}", number, after=a200) for number in range(1, 6)]


def row(*voices: Collection[Voice], of: Collection[By] = starts) -> dict[str, Collection[Voice]]:
    return {one.attempt.id: said for one, said in zip(of, voices, strict=False)}


def found(
    voices: Mapping[str, Collection[Voice]],
    *more: By,
    of: Collection[By] = starts,
    saved: Collection[By] = (),
    root: str | None = HERE,
) -> dict[str, list[tuple[int, bool]]]:
    attempts = [a.attempt, *(one.attempt for one in of if one.attempt.id in voices), *(one.attempt for one in more)]
    ids = {one.attempt.id for one in (a, *saved)}
    for order in (attempts, attempts[::-1]):
        here = quarantined(order, voices, ids, root=root)
    return {save: [(one.attempt.number, one.diverged) for one in row] for save, row in here.items()}


@pytest.mark.parametrize("last", [REPORTED, DIVERGED])
def test_three_starts_that_failed_in_a_row_are_enough_and_two_are_not(last: Collection[Voice]) -> None:
    is_diverged = Voice.DIVERGED in last
    assert not found(row(DIVERGED, last))
    assert found(row(REPORTED, REPORTED, last)) == {a200.id: [(1, False), (2, False), (3, is_diverged)]}
    assert len(found(row(REPORTED, REPORTED, DIVERGED, last))[a200.id]) == 4


@pytest.mark.parametrize("between", [ENDED, SAVED, DIVERGED | {Voice.SAVED}])
def test_a_start_that_ended_in_order_or_saved_ends_the_row(between: Collection[Voice]) -> None:
    assert not found(row(REPORTED, REPORTED, between, REPORTED, DIVERGED))
    assert not found(row(REPORTED, REPORTED, REPORTED, between))


def test_a_start_that_diverged_has_failed_however_it_ended() -> None:
    assert found(row(*[DIVERGED | {Voice.ENDED}] * 3))


def test_a_save_that_any_place_has_ends_the_row() -> None:
    assert found(row(REPORTED, REPORTED, REPORTED))
    assert not found(row(REPORTED, REPORTED, REPORTED), saved=[starts[2]])


def test_a_start_that_reported_nothing_is_left_out() -> None:
    assert not found(row(SILENT, SILENT, SILENT, SILENT))
    assert found(row(REPORTED, SILENT, DIVERGED, SILENT, REPORTED)) == {a200.id: [(1, False), (3, True), (5, False)]}


def test_a_start_that_died_counts_only_if_the_next_was_on_the_same_root() -> None:
    theirs = by("theirs", 4, after=a200, root=THERE)
    died = row(REPORTED, REPORTED, REPORTED)
    assert found(died)
    assert found(died, root=None)
    assert not found(died, root=THERE)
    assert not found(died, theirs)
    assert not found(died, by("theirs", 2, after=a100, root=THERE))
    assert found(row(DIVERGED, DIVERGED, DIVERGED), theirs, root=THERE)


def test_starts_from_another_save_do_not_end_a_row_and_have_a_row_of_their_own() -> None:
    others = [by("other 2", 2, after=a100), by("other 4", 4, after=a100)]
    mine = [starts[0], starts[2], starts[4]]
    voices = row(*[DIVERGED] * 3, of=mine) | row(*[DIVERGED] * 2, of=others)
    assert found(voices, *others) == {a200.id: [(1, True), (3, True), (5, True)]}


@pytest.mark.parametrize("number", [1, 4, 9])
def test_what_a_person_chose_or_a_start_went_back_to_is_never_quarantined(number: int) -> None:
    chosen = by("chosen", number, after=a200, person=True)
    rest = [one for one in starts if one.attempt.number != number]
    assert not found(row(*[DIVERGED] * 5, of=rest), chosen)


def test_a_sentence_names_each_start() -> None:
    voices = row(REPORTED, DIVERGED, REPORTED)
    (failures,) = quarantined([one.attempt for one in starts[:3]], voices, (), root=HERE).values()
    assert why_quarantined(failures) == (
        "3 starts in a row failed from it before their next save (attempts 1, 3 died, attempt 2 reported a loss that "
        "is not finite)"
    )
