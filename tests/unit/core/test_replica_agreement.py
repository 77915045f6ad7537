"""Which ranks hold different values under one name, from what each says of its tensors."""

from __future__ import annotations

import pytest

from ckptmirror.core.replica_agreement import (
    AVERAGES,
    BUFFERS,
    WHOLE,
    Held,
    differing,
    digests_of,
    may_differ,
    of_stage,
    ranks_text,
    representatives,
    sides,
)


def whole(name: str, value: object) -> Held:
    return Held(WHOLE, name, "", str(value))


def found(*ranks: list[Held], told: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """What a save finds: digests first, then the lists of those who are asked."""
    asked = representatives([digests_of(held) for held in ranks], told)
    return differing(
        [one for one in held if rank in asked.get(one.group, ())] for rank, held in enumerate(ranks) if asked
    )


def test_equal_ranks_need_no_lists() -> None:
    held = [whole("a", 1), whole("b", 2), Held("(2,) Shard(0)", "c", "[0] [2]", "3")]
    assert representatives([digests_of(held), digests_of(held[::-1])]) == {}


def test_a_tensor_with_another_value_on_one_rank_is_named_alone() -> None:
    assert found([whole("a", 1), whole("b", 2)], [whole("a", 1), whole("b", 3)]) == {WHOLE: ["b"]}


def test_one_rank_of_each_kind_gives_its_list_and_no_thousand_do() -> None:
    said = [digests_of([whole("a", rank % 2)]) for rank in range(1000)]
    assert representatives(said) == {WHOLE: (0, 1)}
    assert len(representatives([digests_of([whole("a", rank)]) for rank in range(1000)])[WHOLE]) == 8


def test_shards_are_other_pieces_and_may_differ() -> None:
    def shard(rank: int, value: int) -> list[Held]:
        return [Held("(2,) Shard(0)", "a", f"[{2 * rank}] [2]", str(value))]

    assert found(shard(0, 1), shard(1, 2)) == {}
    assert found(shard(0, 1), shard(1, 2), shard(0, 1), shard(1, 2)) == {}
    assert found(shard(0, 1), shard(1, 2), shard(0, 1), shard(1, 3)) == {"(2,) Shard(0)": ["a"]}
    said = [digests_of(held) for held in (shard(0, 1), shard(1, 2), shard(0, 1), shard(1, 3))]
    assert sides(said, "(2,) Shard(0)") == [[1], [3]]


def test_a_tensor_that_one_rank_alone_has_differs_from_nothing() -> None:
    assert found([whole("a", 1)], [whole("a", 1), whole("b", 2)]) == {}
    assert found([whole("a", 1)], [whole("a", 2), whole("b", 2)]) == {WHOLE: ["a"]}


def test_ranks_with_other_tensors_each_are_all_asked() -> None:
    """None has the tensors of another, so only the lists show that two of them differ."""
    ranks = [[whole("shared", rank == 20), whole(f"own {rank}", 0)] for rank in range(21)]
    assert found(*ranks) == {WHOLE: ["shared"]}


def test_what_may_differ_is_told_apart_and_can_be_left_out() -> None:
    ranks = [
        [whole("a", 1), Held(BUFFERS, "mean", "", str(rank)), Held(AVERAGES, "ema.a", "", str(rank))]
        for rank in range(2)
    ]
    assert found(*ranks) == {BUFFERS: ["mean"], AVERAGES: ["ema.a"]}
    assert found(*ranks, told=(BUFFERS,)) == {AVERAGES: ["ema.a"]}
    assert [may_differ(group) for group in (BUFFERS, AVERAGES, WHOLE)] == [True, True, False]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([[0], [1]], "rank 0 and rank 1"),
        ([[0, 1, 2, 3], [4]], "ranks 0-3 and rank 4"),
        ([[0, 2, 3], [1], [4, 5]], "ranks 0, 2-3, rank 1 and ranks 4-5"),
        ([[0], [1], [2], [3, 4], [5]], "rank 0, rank 1, rank 2 and 3 more"),
        ([[0, 2, 4, 6, 8], [1]], "ranks 0, 2, 4, 6, ... and rank 1"),
    ],
)
def test_the_ranks_that_differ_are_named(ranks: list[list[int]], text: str) -> None:
    assert ranks_text(ranks) == text


def test_the_ranks_of_a_stage_are_compared_and_those_of_different_stages_are_not() -> None:
    def of(stage: int, value: int, group: str = WHOLE) -> list[Held]:
        return [Held(of_stage(group, stage), f"layer{stage}", "", str(value))]

    assert found(of(0, 1), of(1, 2), of(0, 1), of(1, 2)) == {}
    assert found(of(0, 1), of(1, 2), of(0, 1), of(1, 3)) == {of_stage(WHOLE, 1): ["layer1"]}
    (group,) = found(of(0, 1, BUFFERS), of(1, 2, BUFFERS), of(0, 4, BUFFERS))
    assert may_differ(group)
    assert found(of(0, 1, BUFFERS), of(0, 4, BUFFERS), told=(group,)) == {}
    assert of_stage(WHOLE, None) == WHOLE
