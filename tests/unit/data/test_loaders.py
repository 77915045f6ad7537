"""The loaders through real DataLoaders and worker processes: what the loop had is what counts."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ckptmirror.core.errors import DataChanged, IntegrityError, UsageError
from ckptmirror.data import SampleLoader, ShardLoader

SAMPLES = TensorDataset(torch.arange(37))
FILES = {f"part-{number}": 5 + number for number in range(7)}  # name, and how many samples
ALL_OF_FILES = Counter(f"{name}/{at}" for name, size in FILES.items() for at in range(size))


def lines(name: str, start: int) -> Iterator[str]:
    return (f"{name}/{at}" for at in range(start, FILES[name]))


def samples(**more: Any) -> SampleLoader:
    return SampleLoader(SAMPLES, **{"batch_size": 4, "last": "uneven", "rank": 0, "world_size": 1, **more})


def shards(**more: Any) -> ShardLoader:
    given = {"batch_size": 3, "shuffle_block": 4, "open_shards": 2, "collate_fn": list, "rank": 0, "world_size": 1}
    return ShardLoader(FILES, lines, **{**given, **more})


def flat(batches: Iterable[Any]) -> list[Any]:
    return [
        sample for batch in batches for sample in (batch[0].tolist() if isinstance(batch[0], torch.Tensor) else batch)
    ]


LOADERS = {"samples": (samples, Counter(range(37))), "shards": (shards, ALL_OF_FILES)}


@pytest.fixture(params=LOADERS)
def loader_and_all(request: pytest.FixtureRequest) -> Any:
    return LOADERS[request.param]


def merged(build: Any, states: list[dict[str, Any]], world_size: int, **more: Any) -> list[Any]:
    """The loaders of a job, each with the position that it gets of the states of another."""
    found = []
    for rank in range(world_size):
        loader = build(rank=rank, world_size=world_size, **more)
        loader.load_state_dict(loader.merge_state_dicts(states, rank, world_size))
        found.append(loader)
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_have_read_ahead_does_not_count(loader_and_all: Any, workers: int) -> None:
    build, everything = loader_and_all
    more = {"num_workers": workers} | ({"prefetch_factor": 4} if workers else {})
    straight = flat(build(**more))
    first = build(**more)
    begun = flat(itertools.islice(first, 5))
    state = copy.deepcopy(first.state_dict())
    after = build(**more)
    after.load_state_dict(state)
    assert begun + flat(after) == straight, "the same ranks and workers go on in the same order"
    assert Counter(straight) == everything
    assert after.epoch == 1


def test_two_ranks_then_three_then_one_with_other_workers_read_every_sample_once(loader_and_all: Any) -> None:
    build, everything = loader_and_all
    seen: Counter[Any] = Counter()
    ranks = [build(rank=rank, world_size=2, num_workers=2) for rank in range(2)]
    for count, loader in zip((2, 3), ranks, strict=True):  # not in step
        seen.update(flat(itertools.islice(loader, count)))
    ranks = merged(build, [loader.state_dict() for loader in ranks], 3, num_workers=1, batch_size=2)
    for loader in ranks:
        seen.update(flat(itertools.islice(loader, 1)))
    (last,) = merged(build, [loader.state_dict() for loader in ranks], 1, num_workers=2)
    seen.update(flat(last))
    assert seen == everything


def test_a_loop_that_breaks_goes_on_where_it_stopped(loader_and_all: Any) -> None:
    build, everything = loader_and_all
    loader = build()
    seen: Counter[Any] = Counter()
    for batch in loader:
        seen.update(flat([batch]))
        break
    assert loader.epoch == 0
    assert seen + Counter(flat(loader)) == everything
    assert loader.epoch == 1


def test_each_epoch_has_another_order_which_no_call_has_to_ask_for(loader_and_all: Any) -> None:
    build, everything = loader_and_all
    loader = build()
    first, second = flat(loader), flat(loader)
    assert first != second
    assert Counter(second) == everything
    again = build()
    assert [flat(again), flat(again)] == [first, second]
    assert flat(build(seed=1)) != first


def test_nothing_is_drawn_from_the_global_generators(loader_and_all: Any) -> None:
    build, _ = loader_and_all
    before = torch.get_rng_state()
    loader = build(num_workers=1)
    loader.load_state_dict(loader.state_dict())
    assert flat(loader)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plain_loader_of_torch_draws_from_the_global_generator_unless_it_has_its_own() -> None:
    """Why a run that resumes within an epoch has other dropout masks: it makes one iterator more."""
    for generator, same in ((None, False), (torch.Generator(), True)):
        before = torch.get_rng_state()
        iter(DataLoader(SAMPLES, generator=generator))
        assert torch.equal(torch.get_rng_state(), before) is same


def test_torchs_distributed_sampler_repeats_its_order_unless_each_epoch_is_set() -> None:
    sampler = DistributedSampler(SAMPLES, num_replicas=2, rank=0)
    first = list(sampler)
    assert list(sampler) == first, "without set_epoch the second epoch is the first again"
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    after_a_resume = DistributedSampler(SAMPLES, num_replicas=2, rank=0)
    assert list(after_a_resume) == first, "a resumed run has to set the epoch, too"
    after_a_resume.set_epoch(1)
    assert list(after_a_resume) == second


@pytest.mark.parametrize(("last", "batches", "seen"), [("pad", [5, 5, 5], 39), ("drop", [4, 4, 4], 36)])
def test_ranks_have_the_same_number_of_batches_and_repeats_are_counted(last: Any, batches: Any, seen: int) -> None:
    ranks = [SampleLoader(SAMPLES, 3, last=last, rank=rank, world_size=3) for rank in range(3)]
    assert [len(loader) for loader in ranks] == batches
    found = [flat(loader) for loader in ranks]
    assert len(found[0]) == len(found[1]) == len(found[2])
    assert sum(map(len, found)) == seen
    assert len(set(itertools.chain(*found))) == min(seen, 37)


def test_the_length_is_what_is_left_of_the_epoch() -> None:
    loader = samples()
    assert len(loader) == 10
    flat(itertools.islice(loader, 3))
    assert len(loader) == 7
    flat(loader)
    assert len(loader) == 10


class Twice(Dataset[int]):
    """Reads what it is asked for and says by which worker's generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, torch.randint(1 << 30, ()).item()


def test_what_workers_draw_depends_on_seed_epoch_and_position_alone() -> None:
    def drawn(seed: int) -> Any:
        loader = SampleLoader(Twice(), 2, seed=seed, num_workers=1, rank=0, world_size=1)
        return [[batch[1].tolist() for batch in loader] for _ in range(2)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]


def test_workers_that_are_kept_read_each_epoch() -> None:
    loader = samples(num_workers=1, persistent_workers=True)
    assert Counter(flat(loader)) == Counter(flat(loader)) == Counter(range(37))
    with pytest.raises(UsageError, match="cannot keep its workers"):
        shards(num_workers=1, persistent_workers=True)


def test_only_the_newest_iteration_goes_on(loader_and_all: Any) -> None:
    """Two at once would both move the one position; a loaded position would be overwritten."""
    build, _ = loader_and_all
    loader = build()
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(UsageError, match="another one has begun"):
        next(first)
    loader.load_state_dict(build().state_dict())
    with pytest.raises(UsageError, match="a position was loaded"):
        next(second)


def test_an_old_iteration_does_not_end_the_epoch_of_a_newer_one() -> None:
    loader = samples()
    first = iter(loader)
    list(itertools.islice(first, len(loader)))
    loader.load_state_dict(samples().state_dict())
    with pytest.raises(UsageError, match="a position was loaded"):
        next(first)
    assert (loader.epoch, len(loader)) == (0, 10)


@pytest.mark.parametrize(
    ("build", "saved", "here", "said"),
    [
        (samples, {"seed": 1}, {}, "seed=1; here it is seed=0"),
        (samples, {"shuffle": False}, {}, "shuffle=False"),
        (samples, {"version": "a"}, {"version": "b"}, "version='a'"),
        (shards, {"seed": 1}, {}, "seed=1"),
        (shards, {"shuffle_block": 2}, {}, "shuffle_block=2"),
    ],
)
def test_a_position_in_other_data_is_refused_by_the_name_of_the_argument(
    build: Any, saved: Any, here: Any, said: str
) -> None:
    with pytest.raises(DataChanged, match=said):
        build(**here).load_state_dict(build(**saved).state_dict())
    with pytest.raises(DataChanged, match=said):
        build(**here).merge_state_dicts([build(**saved).state_dict()], 0, 1)


def test_data_of_another_length_is_refused() -> None:
    other = SampleLoader(TensorDataset(torch.arange(36)), 4)
    with pytest.raises(DataChanged, match="size=36; here it is size=37"):
        samples().load_state_dict(other.state_dict())


def test_a_file_that_is_gone_or_changed_is_named() -> None:
    saved = shards()
    flat(itertools.islice(saved, 1))
    for there, said in (
        ({**FILES, "part-3": 99}, "part-3 has changed"),
        ({"part-3": 8}, "part-0 is gone, .* and 3 more"),
    ):
        with pytest.raises(DataChanged, match=said):
            ShardLoader(there, lines, 3, shuffle_block=4, rank=0, world_size=1).load_state_dict(saved.state_dict())


def test_the_position_of_one_of_several_ranks_is_not_taken_for_that_of_all(loader_and_all: Any) -> None:
    build, _ = loader_and_all
    with pytest.raises(UsageError, match="data rank 1 of 2"):
        build(rank=0, world_size=3).load_state_dict(build(rank=1, world_size=2).state_dict())


def test_ranks_that_read_the_same_data_have_one_position(loader_and_all: Any) -> None:
    """Four ranks, of which two and two read the same, then three that read each their own."""
    build, everything = loader_and_all
    ranks = [build(rank=rank // 2, world_size=2) for rank in range(4)]
    first = [flat(itertools.islice(loader, 2)) for loader in ranks]
    assert first[0] == first[1] != first[2] == first[3]
    rest = [flat(loader) for loader in merged(build, [loader.state_dict() for loader in ranks], 3)]
    assert Counter(itertools.chain(first[0], first[2], *rest)) == everything


@pytest.mark.parametrize(
    ("then", "now"), [([0, 0, 1, 1], [0, 1]), ([0, 1], [0, 0, 1, 1]), ([0, 0, 1, 1], [0, 1, 0, 1])]
)
def test_if_other_ranks_share_their_data_all_go_on_with_the_positions_of_their_data_rank(
    then: list[int], now: list[int], loader_and_all: Any
) -> None:
    build, everything = loader_and_all
    had = [build(rank=of, world_size=2) for of in then]
    first = {of: flat(itertools.islice(loader, 1 + 2 * of)) for of, loader in zip(then, had, strict=True)}
    states = [loader.state_dict() for loader in had]
    rest: dict[int, list[Any]] = {}
    for rank, of in enumerate(now):
        loader = build(rank=of, world_size=2)
        loader.load_state_dict(loader.merge_state_dicts(states, rank, len(now)))
        read = flat(loader)
        assert rest.setdefault(of, read) == read
    assert Counter(itertools.chain(*first.values(), *rest.values())) == everything


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"order": 3}, {"rank": 5}, {"rank": -1}, {"world_size": 0}, {"epoch": "0"}, {"epoch": True},
        {"batches": -1}, {"done": [[5, 3]]}, {"done": [[0, 3], [2, 4]]}, {"done": [[0, 99]]}, {"done": [1]},
        {"last": "some"}, {"ahead": [[1]]}, {"batch_size": 0}, {"batches": 11}, {"batches": 10**18},
    ],
    ids=str,
)  # fmt: skip
def test_a_broken_position_of_samples_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        samples().load_state_dict({**samples().state_dict(), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"lists": []}, {"lists": [[["part-0", 5]]]}, {"lists": [[["part-0", 5, -1]]]}, {"lists": [[[0, 5, 0]]]},
        {"lists": [[["part-0", [5], 0]]]}, {"lists": 3}, {"listing": None}, {"ahead": {"a": 1}}, {"rank": 1},
        {"lists": [[["part-0", 5, 0]], [["part-0", 5, 0]]], "listing": "other"},
    ],
    ids=str,
)  # fmt: skip
def test_a_broken_position_of_shards_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        shards().load_state_dict({**shards().state_dict(), **change})


@pytest.mark.parametrize("change", [{"world_size": 10**12}, {"epoch": 10**12}], ids=str)
def test_positions_that_no_job_has_are_refused_before_they_take_memory(
    change: dict[str, Any], loader_and_all: Any
) -> None:
    build, _ = loader_and_all
    states = [build(rank=rank, world_size=2).state_dict() for rank in range(2)]
    with pytest.raises(IntegrityError, match=r"data ranks 0, 1 of|from epoch 0 to"):
        build().merge_state_dicts([states[0], {**states[1], **change}], 0, 1)


def test_the_position_of_another_kind_of_loader_is_refused() -> None:
    with pytest.raises(UsageError, match="position of SampleLoader, not of a ShardLoader"):
        shards().load_state_dict(samples().state_dict())
    with pytest.raises(UsageError, match="position of another loader"):
        shards().load_state_dict({"position": 3})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: samples(sampler=[1]), "takes no sampler"),
        (lambda: samples(drop_last=True), "takes no drop_last"),
        (lambda: samples(in_order=False), "SampleLoader takes no in_order=False"),
        (lambda: shards(in_order=False), "ShardLoader takes no in_order=False"),
        (lambda: samples(last="some"), "last is 'some'"),
        (lambda: samples(batch_size=0), "batch_size is 0"),
        (lambda: samples(batch_size="4"), "batch_size is '4'"),
        (lambda: samples(batch_size=2.0), "batch_size is 2.0"),
        (lambda: SampleLoader(one for one in range(3)), "not an object of type generator"),
        (lambda: ShardLoader("train.txt", print), "not 'train.txt'"),
        (lambda: ShardLoader(5, print), "not 5"),
        (lambda: ShardLoader(["a", "b"], None), "and None"),
        (lambda: ShardLoader(["a", "b"], print, shuffle_block="x"), "shuffle_block is 'x'"),
        (lambda: samples(rank=2, world_size=2), "rank is 2"),
        (lambda: SampleLoader(SAMPLES, rank=0), "belong together"),
        (lambda: shards(open_shards=0), "open_shards is 0"),
        (lambda: shards(dataset=[]), "takes no dataset"),
        (lambda: ShardLoader(["a", "a"], lines), "Two shards have one name"),
        (lambda: shards(rank=0, world_size=8), "7 shards for 8 ranks"),
    ],
)
def test_a_wrong_argument_is_named(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()


def test_importing_ckptmirror_imports_neither_the_loaders_nor_torch(tmp_path: Path) -> None:
    code = "import sys, ckptmirror; assert not {'torch', 'numpy', 'ckptmirror.data'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
