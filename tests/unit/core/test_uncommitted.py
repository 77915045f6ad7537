"""A mirror's saves that wait for nodes: which nodes, and what is there."""

from __future__ import annotations

from ckptmirror.core import names
from ckptmirror.core.model import Artifact, Attempt, Digest, Meta
from ckptmirror.core.uncommitted import (
    LEFT_OFF_TEXT,
    NodeShare,
    given_up_text,
    held_back_text,
    is_left_off_text,
    node_behind_text,
    parts_there,
    superseded_text,
    uncommitted_save,
)

ONE, OTHER = "1f0c9a2e" + "0" * 24, "2f0c9a2e" + "0" * 24
ATTEMPT = Attempt("aa" * 16, 0, None)


def part(node: int, sizes: dict[str, int], *, save_id: str = ONE, nodes: int = 3) -> Meta:
    artifacts = tuple(Artifact(p, ("model",), node, Digest(n, 0, 4 * 1024 * 1024, ())) for p, n in sizes.items())
    return Meta("r" * 32, ATTEMPT, 200, save_id, 1, ("model",), nodes, nodes, node, artifacts)


def test_parts_of_a_save_without_a_meta_are_found_by_their_names() -> None:
    listed = [names.part_name(200, ONE, number, 3) for number in (3, 1)]
    listed += [names.part_name(100, OTHER, 1, 2), "model_000200.pt", "parts/notes.txt", "meta_000100.json"]
    (found,) = parts_there(listed, [OTHER])
    assert (found.step, found.digits, found.nodes, list(found.names)) == (200, ONE[:8], 3, [0, 2])
    assert found.absent(9) == [1]
    assert found.problem.why.startswith(
        "3 nodes saved it, and it waits for node 1: `ckptmirror drain` there finishes it"
    )


def test_a_name_that_claims_any_number_of_nodes_costs_nothing() -> None:
    (found,) = parts_there([names.part_name(200, ONE, 1, 99_999)], [])
    assert found.absent(3) == [1, 2, 3]
    assert found.awaited == "nodes 1, 2, 3, 4, 5, 6, 7, 8, ..."


def test_when_all_parts_are_there_it_waits_for_the_last_node_to_commit() -> None:
    (found,) = parts_there([names.part_name(200, ONE, number, 2) for number in (1, 2)], [])
    assert (found.absent(1), found.awaited) == ([], "the last of them to commit")


def test_a_part_says_what_its_node_saved_and_the_listing_what_of_it_is_missing() -> None:
    (there,) = parts_there([names.part_name(200, ONE, number, 3) for number in (1, 3)], [])
    parts = [part(2, {"optim_000200_rank2.pt": 7}), part(0, {"model_000200.pt": 100, "optim_000200_rank0.pt": 5})]
    listed = {
        "model_000200.pt": (99, ONE),  # not whole
        "optim_000200_rank0.pt": (5, ONE),
        "optim_000200_rank2.pt": (7, ONE),
        "optim_000200_rank1.pt": (11, ONE),
        "extra_000200_rank1.pt": (13, OTHER),
        f"tensors_000200-{ONE[:8]}_rank1.json": (17, ""),
        "extra_000200_rank5.pt": (19, ""),
    }
    found = uncommitted_save(there, parts, listed, {"extra_000200_rank5.pt"}, is_alone=True)
    assert found.save_id == ONE
    assert found.shares == (NodeShare(0, 2, 105, 1, 100), NodeShare(2, 1, 7))
    assert (found.other_files, found.other_bytes) == (2, 28)
    assert found.size_bytes == 5 + 7 + 28


def test_a_file_that_either_of_two_waiting_saves_may_own_counts_for_none() -> None:
    (there,) = parts_there([names.part_name(200, ONE, 1, 2)], [])
    listed = {"optim_000200_rank1.pt": (11, ""), "model_0002000.pt": (13, ""), "notes.txt": (3, "")}
    assert uncommitted_save(there, [], listed, (), is_alone=False).other_files == 0
    alone = uncommitted_save(there, [], listed, (), is_alone=True)
    assert (alone.save_id, alone.other_files, alone.other_bytes) == (ONE[:8], 1, 11)


def test_what_is_left_off_until_disks_are_back_is_told_from_what_waits_or_is_held_back() -> None:
    assert is_left_off_text(LEFT_OFF_TEXT)
    assert is_left_off_text(given_up_text(5))
    others = (node_behind_text(names.part_name(5, ONE, 1, 2), "gs://b/r"), held_back_text(5, "gs://b/r", "A", ""))
    assert not any(is_left_off_text(text) for text in (*others, superseded_text(5, "gs://b/r", "so"), "policy"))
