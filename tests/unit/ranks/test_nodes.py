"""Which ranks are one node, given their keys and the tokens that they saw."""

from __future__ import annotations

import pytest

from ckptmirror.ranks.nodes import NodeLayout, joined, layout_of, ranks_by_node


@pytest.mark.parametrize(
    ("keys", "seen", "found"),
    [
        ("aabb", [[], [], [], []], "aabb"),
        ("aabb", [[0, 2], [], [0, 2], []], "aaaa"),
        ("aabb", [[0], [], [0, 2], []], "aaaa"),  # one of two is enough
        ("aabb", [[0, 2], [], [2], []], "aaaa"),
        ("abcd", [[0], [1, 3], [2], [3]], "abcb"),
        ("abcd", [[0], [1, 3], [2, 3], [3]], "abbb"),  # through the third
        ("dcba", [[3], [2], [1], [0]], "dccd"),
        ("abcdef", [[], [0], [1], [2], [3], [4]], "aaaaaa"),
        ("abcdef", [[1], [2], [3], [4], [5], []], "aaaaaa"),
        ("", [], ""),
    ],
)
def test_ranks_whose_tokens_are_seen_share_a_root(keys: str, seen: list[list[int]], found: str) -> None:
    assert "".join(joined(keys, seen)) == found


def test_nodes_count_by_their_lowest_rank() -> None:
    keys = ["b", "a", "b", "c", "a"]
    of_ranks = (0, 1, 0, 2, 1)
    assert [layout_of(keys, rank) for rank in range(5)] == [
        NodeLayout(0, 3, (0, 2), 0, of_ranks),
        NodeLayout(1, 3, (1, 4), 1, of_ranks),
        NodeLayout(0, 3, (0, 2), 2, of_ranks),
        NodeLayout(2, 3, (3,), 3, of_ranks),
        NodeLayout(1, 3, (1, 4), 4, of_ranks),
    ]
    assert [layout_of(keys, rank).local_rank for rank in range(5)] == [0, 0, 1, 0, 1]
    assert ranks_by_node(keys) == [(0, 2), (1, 4), (3,)]


def test_a_job_of_one_node_names_no_nodes() -> None:
    assert layout_of(["a", "a"], 1) == NodeLayout(0, 1, (0, 1), 1)
