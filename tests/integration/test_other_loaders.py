"""What docs/guide/data.md says of other people's loaders.

The libraries are not among the dependencies of the tests: `pip install torchdata datasets` runs what is skipped here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

pytestmark = pytest.mark.long

DATA = TensorDataset(torch.arange(40))


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "its own generator"])
def test_a_stateful_dataloader_changes_dropout_after_a_resume_unless_it_has_a_generator_of_its_own(own: bool) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def run(stop: int) -> tuple[list[int], list[float]]:
        def loader() -> Any:
            generator = torch.Generator().manual_seed(3) if own else None
            return stateful.StatefulDataLoader(DATA, batch_size=4, shuffle=True, generator=generator)

        torch.manual_seed(0)
        samples: list[int] = []
        draws: list[float] = []
        first, second = loader(), loader()
        for (batch,) in first:
            samples += batch.tolist()
            draws.append(torch.rand(()).item())
            if len(draws) == stop:
                second.load_state_dict(copy.deepcopy(first.state_dict()))
                break
        for (batch,) in second if len(draws) < 10 else ():
            samples += batch.tolist()
            draws.append(torch.rand(()).item())
        return samples, draws

    straight, resumed = run(10), run(4)
    assert straight[0] == resumed[0]
    assert (straight[1] == resumed[1]) is own


@pytest.mark.parametrize("buffer_size", [None, 8])
def test_a_streaming_data_set_is_exact_but_for_what_is_in_its_shuffle_buffer(buffer_size: int | None) -> None:
    datasets = pytest.importorskip("datasets")

    def samples(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for number in range(20):
                yield {"x": 100 * shard + number}

    def build() -> Any:
        built = datasets.IterableDataset.from_generator(samples, gen_kwargs={"shards": [0, 1, 2]})
        return built if buffer_size is None else built.shuffle(seed=1, buffer_size=buffer_size)

    first, second = build(), build()
    straight = [sample["x"] for sample in build()]
    found: list[int] = []
    for sample in first:
        found.append(sample["x"])
        if len(found) == 15:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            break
    found += [sample["x"] for sample in second]
    assert len(found) == len(set(found)), "nothing comes twice"
    lost = set(straight) - set(found)
    if buffer_size is None:
        assert found == straight
    else:
        assert 0 < len(lost) <= buffer_size
