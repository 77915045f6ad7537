"""A few random histories of jobs of several nodes; ``make campaign-nodes`` plays hundreds."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckptmirror.testing import GcsServerProcess
from tests.nodes.campaign.histories import Step, environment, history, in_words, play

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("CKPTMIRROR_CAMPAIGN_SEED", "1"))
SLICE = (7, 42, 1_000_000 + SEED)
"""The last is another one in every run."""


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServerProcess]:
    with environment() as server:
        yield server


@pytest.mark.parametrize("seed", SLICE)
def test_no_history_of_nodes_loses_or_mixes_a_save_or_hangs(seed: int, server: GcsServerProcess) -> None:
    steps = history(seed)
    played = play(seed, steps, server)
    assert played.verdict == "ok", in_words(seed, played, steps)
    assert played.jobs > 1


def test_ranks_that_do_not_lead_wait_for_no_part_of_a_node_that_is_gone(server: GcsServerProcess) -> None:
    """Of two jobs that started at once, a node of the loser then began another job without its peer."""
    steps = [Step("job", 7712), Step("two_at_once", 2866), Step("job", 4085)]
    played = play(45, steps, server)
    assert played.verdict == "ok", in_words(45, played, steps)
