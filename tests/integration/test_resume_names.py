"""Resuming with a model whose names are not all those of the save: patterns to leave out, new names, not strict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import TrainState
from ckptmirror.core.errors import CkptMirrorError, UsageError
from tests.kit.processes import run_ranks
from tests.kit.training import running, same

KINDS = ("dcp", "model", "emergency")


def state_of(body: str = "body", head: str = "head", width: int = 2, seed: int = 1) -> TrainState:
    torch.manual_seed(seed)
    model = nn.ModuleDict({body: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), head: nn.Linear(2, width)})
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def forward(state: TrainState) -> None:
    body, head = state.model.values()
    head(body(torch.rand(4, 2))).sum().backward()
    state.optimizer.step()


def saved(root: Path, kind: str) -> TrainState:
    state = state_of(seed=0)
    with running(root) as manager:
        manager.resume(state)
        forward(state)
        if kind == "emergency":
            manager.save_emergency_checkpoint(1, state)
        else:
            manager.save(1, state, kinds=(kind,)).wait()
    return state


def of(state: TrainState, name: str) -> Any:
    """The moments of a parameter."""
    return state.optimizer.state.get(dict(state.model.named_parameters())[name], {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_another_shape_is_left_out_with_its_moments(tmp_path: Path, kind: str) -> None:
    was = saved(tmp_path, kind)
    state = state_of(width=3)
    head = state.model["head"].weight.clone()
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match=r"head.weight has the shape"):
            manager.resume(state)
        start = manager.resume(state, exclude=("model.head.*",))
    assert start is not None
    assert "model: head.weight, head.bias: left out (exclude), as they are" in start.missing
    assert torch.equal(state.model["head"].weight, head)
    assert same(dict(state.model["body"].state_dict()), dict(was.model["body"].state_dict()))
    assert same(of(state, "body.0.weight"), of(was, "body.0.weight"))
    assert not of(state, "head.weight")
    forward(state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rename",
    [
        {"body.*": "trunk.*", "head.*": "out.*"},
        lambda name: name.replace("body", "trunk").replace("head", "out"),
    ],
)
def test_new_names_are_those_of_the_model_and_of_its_moments(tmp_path: Path, kind: str, rename: Any) -> None:
    was = saved(tmp_path, kind)
    state = state_of("trunk", "out")
    with running(tmp_path) as manager:
        with pytest.raises(UsageError, match="The checkpoint does not match the model"):
            manager.resume(state)
        start = manager.resume(state, rename=rename)
    assert start is not None
    assert start.loaded[:2] == ("model", "optimizer")
    assert same(list(state.model.state_dict().values()), list(was.model.state_dict().values()))
    assert same(of(state, "trunk.0.weight"), of(was, "body.0.weight"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("body", "rename"),
    [
        ("trunk", {"body.*": "trunk.*"}),
        ("somebody", {"body*": "somebody*"}),
        ("bodybody", {"body*": "bodybody*"}),
        ("bodybody", lambda name: name.replace("body", "bodybody")),
    ],
)
def test_a_command_that_renames_what_it_loads_starts_again_from_its_own_save(
    tmp_path: Path, kind: str, body: str, rename: Any
) -> None:
    was = saved(tmp_path, kind)
    for began in (1, 2, 3):
        state = state_of(body)
        with running(tmp_path, kinds=("dcp", "model")) as manager:
            start = manager.resume(state, rename=rename, strict=False)
            assert start is not None
            assert (start.step, start.missing) == (began, ())
            assert same(list(state.model.state_dict().values()), list(was.model.state_dict().values()))
            assert same(of(state, f"{body}.0.weight"), of(was, "body.0.weight"))
            if kind == "emergency":
                manager.save_emergency_checkpoint(began + 1, state)
            else:
                manager.save(began + 1, state, kinds=(kind,)).wait()


def three(seed: int, width: int = 2) -> TrainState:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(width, 2), "c": nn.Linear(2, 2)})
    return TrainState(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    ("rename", "where"),
    [
        ({"a.*": "b.*", "b.*": "a.*"}, {"a": "b", "b": "a", "c": "c"}),
        ({"a.*": "b.*", "b.*": "gone.*"}, {"b": "a", "c": "c"}),
        ({"a.*": "b.*", "b.*": "c.*", "c.*": "gone.*"}, {"b": "a", "c": "b"}),
    ],
)
def test_names_that_save_and_model_both_have_are_renamed_once(
    rename: dict[str, str], where: dict[str, str], tmp_path: Path
) -> None:
    """The names do not tell whether it was done: the save does."""
    was = three(0)
    with running(tmp_path) as manager:
        manager.resume(was)
        manager.save(1, was).wait()
    for began in (1, 2, 3):
        state = three(began)
        fresh = {name: value.clone() for name, value in state.model.state_dict().items()}
        with running(tmp_path) as manager:
            start = manager.resume(state, rename=rename, strict=False, exclude=("optimizer",))
            assert start is not None
            assert start.step == began
            manager.save(began + 1, state).wait()
        if began == 1:
            for new, old in where.items():
                assert same(state.model[new].state_dict(), was.model[old].state_dict())
            for new in {"a", "b", "c"} - where.keys():
                assert torch.equal(state.model[new].weight, fresh[f"{new}.weight"])
            first = state
        assert same(state.model.state_dict(), first.model.state_dict())
    with running(tmp_path) as manager, pytest.raises(UsageError, match="No tensor of the save is one of the model's"):
        manager.resume(state_of(), strict=False)


def test_an_exchange_is_not_undone_after_a_start_without_it_or_in_a_larger_model(tmp_path: Path) -> None:
    was, rename = TrainState(three(0).model), {"a.*": "b.*", "b.*": "a.*"}
    with running(tmp_path) as manager:
        manager.resume(was)
        manager.save(1, was).wait()
    larger = nn.ModuleDict({**three(2).model, "d": nn.Linear(2, 2)})
    models = [three(1).model, three(1).model, larger]
    for began, model in enumerate(models, 1):
        state = TrainState(model)
        with running(tmp_path) as manager:
            manager.resume(state, rename=rename, strict=False)
            assert same(state.model["a"].state_dict(), was.model["b"].state_dict())
            assert same(state.model["b"].state_dict(), was.model["a"].state_dict())
            if began == 1:
                manager.save(2, state).wait()
                manager.resume(state, policy=2)  # a way back in the process
            manager.save(began + 2, state).wait()
    with running(tmp_path) as manager:
        manager.resume(state, rename={"b.*": "c.*", "c.*": "b.*"})
        assert same(state.model["c"].state_dict(), was.model["a"].state_dict())


def test_a_rename_whose_new_names_are_in_the_save_may_stay_and_grow(tmp_path: Path) -> None:
    """Also where the save has no mark of it: one of an older release, or of a start without it."""
    was = saved(tmp_path, "dcp")
    trunk = {"body.*": "trunk.*"}
    starts = [("trunk", "head", trunk), ("trunk", "head", None), ("trunk", "head", trunk)]
    starts.append(("trunk", "out", trunk | {"head.*": "out.*"}))
    for began, (body, head, rename) in enumerate(starts, 1):
        state = state_of(body, head)
        with running(tmp_path) as manager:
            start = manager.resume(state, rename=rename)
            assert start is not None
            assert (start.step, start.missing) == (began, ())
            assert same(list(state.model.state_dict().values()), list(was.model.state_dict().values()))
            manager.save(began + 1, state).wait()


def test_a_pattern_that_cuts_a_prefix_off_is_refused_where_none_has_it_and_no_start_cut_it(tmp_path: Path) -> None:
    saved(tmp_path, "dcp")
    with running(tmp_path) as manager, pytest.raises(UsageError, match=r"rename holds 'module.\*'") as raised:
        manager.resume(state_of(), rename={"module.*": "*"})
    assert "Take it out if an earlier start has renamed them." in raised.value.hint


def test_a_save_under_all_names_of_the_model_that_is_renamed_once_more_says_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, "dcp")
    with running(tmp_path) as manager, pytest.raises(UsageError, match="does not match the model") as raised:
        manager.resume(state_of(), rename={"*": "net.*"})
    assert raised.value.hint == "The save has all names of the model as they are: leave `rename` out."


def exchanged(rank: int, root: str, differs: bool) -> str | list[Any]:
    """Two nodes, and a function that also reads its rank."""

    def rename(name: str) -> str:
        if differs and rank == 1:
            return name
        return {"a": "b", "b": "a", "c": "c"}[name[rank * 0]] + name[1:]

    found = []
    with running(Path(root) / str(rank), kinds=("dcp",), timeout_s=60.0) as manager:
        for step in (1, 2, 3):
            state = TrainState(three(step).model)
            try:
                manager.resume(state, rename=rename)
            except CkptMirrorError as error:
                return str(error)
            found.append({name: module.state_dict() for name, module in state.model.items()})
            manager.save(step, state).wait()
    return found


def test_all_ranks_rename_or_none_does(tmp_path: Path) -> None:
    for first, second, third in run_ranks(2, exchanged, str(tmp_path / "one"), False):
        assert same(first, second)
        assert same(second, third)
    text = "rename gives tensors other names on rank 1 on node 1 than on rank 0"
    assert all(text in found for found in run_ranks(2, exchanged, str(tmp_path / "two"), True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_one_side_alone_is_skipped_if_the_load_is_not_strict(tmp_path: Path, kind: str) -> None:
    was = saved(tmp_path, kind)
    state = state_of(head="other")
    before = state.model["other"].weight.clone()
    with running(tmp_path) as manager:
        start = manager.resume(state, strict=False)
    assert start is not None
    assert "model: other.weight, other.bias: not in the save, as they are (strict=False)" in start.missing
    assert "model: head.weight, head.bias: in the save alone, not loaded (strict=False)" in start.missing
    assert torch.equal(state.model["other"].weight, before)
    assert same(of(state, "body.0.weight"), of(was, "body.0.weight"))
    assert not of(state, "other.weight")


def test_a_load_takes_the_same(tmp_path: Path) -> None:
    was = saved(tmp_path, "model")
    state = state_of("trunk")
    head = state.model["head"].weight.clone()
    with running(tmp_path / "other") as manager:
        found = manager.load(state, tmp_path, rename={"body.*": "trunk.*"}, exclude=("model.head.*",))
    assert "optimizer" in found.loaded
    assert same(list(state.model["trunk"].parameters()), list(was.model["body"].parameters()))
    assert torch.equal(state.model["head"].weight, head)


class Turned(nn.Module):
    """A layer that converts what version 1 of it saved."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(2, 2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *more)


@pytest.mark.parametrize("arguments", [{"rename": {"a.*": "b.*"}}, {"exclude": ("model.b.*",), "strict": False}])
def test_modules_keep_their_versions_under_new_names_and_if_they_are_left_out(tmp_path: Path, arguments: Any) -> None:
    state = TrainState(nn.ModuleDict({"a": Turned(), "c": nn.Linear(1, 1)}))
    with running(tmp_path) as manager:
        manager.resume(state)
        manager.save(1, state).wait()
    fresh = TrainState(nn.ModuleDict({"b": Turned(), "c": nn.Linear(1, 1)}))
    expected = state.model["a"].weight if "rename" in arguments else fresh.model["b"].weight
    expected = expected.detach().clone()
    with running(tmp_path) as manager:
        manager.resume(fresh, **arguments)
    assert torch.equal(fresh.model["b"].weight, expected)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"exclude": ("model.haed.*",)}, r"exclude holds 'model.haed.\*', and neither .*closest: .*model.head.bias"),
        ({"rename": {"bodi.*": "trunk.*"}}, r"rename holds 'bodi.\*', and the save has no .*closest: .*body.0"),
        ({"rename": {"*.weight": "weight"}}, "rename makes one name of"),
        ({"rename": lambda _: None}, "rename returned None for"),
        ({"rename": lambda name: name.no_such}, "rename failed for .*AttributeError"),
        ({"rename": "old"}, "rename is 'old'; it must be a dict"),
        ({"rename": {"old": "new.*"}}, "rename holds 'old': 'new.*'"),
        ({"rename": {"body.*": "trunk.*", "head.*": "out.*"}}, "Missing in the checkpoint: head.weight, head.bias"),
        ({"exclude": ("head.*",)}, "exclude holds 'head.*'; it must be a tuple of names"),
    ],
)
@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_a_mistake_is_named_and_nothing_is_loaded(tmp_path: Path, kind: str, arguments: Any, what: str) -> None:
    saved(tmp_path, kind)
    state = state_of("trunk")
    before = state.model["trunk"][0].weight.clone()
    with running(tmp_path) as manager, pytest.raises(UsageError, match=what):
        manager.resume(state, **arguments)
    assert torch.equal(state.model["trunk"][0].weight, before)


def sharded(rank: int, root: str, kind: Any, body: str, arguments: dict[str, Any]) -> tuple[str, Any, Any]:
    from torch.distributed.fsdp import fully_shard

    state = state_of(body, seed=rank)
    for layer in state.model.values():
        fully_shard(layer)
    state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.1)
    full: Callable[[Any], Any] = lambda value: value.full_tensor().detach()  # noqa: E731
    with running(Path(root), timeout_s=60.0) as manager:
        try:
            start = manager.resume(state, **arguments)
        except CkptMirrorError as error:
            return str(error), None, None
        if start is None:
            forward(state)
            manager.save(1, state, kinds=(kind,)).wait()
        weight = state.model[body][0].weight
        return "loaded", full(weight), full(state.optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("kind", ["dcp", "model"])
def test_shards_follow_their_new_names(tmp_path: Path, kind: str) -> None:
    first = run_ranks(2, sharded, str(tmp_path), kind, "body", {})
    again = run_ranks(2, sharded, str(tmp_path), kind, "trunk", {"rename": {"body.*": "trunk.*"}})
    assert [text for text, _, _ in again] == ["loaded"] * 2
    for before, after in zip(first, again, strict=True):
        assert torch.equal(before[1], after[1])
        assert torch.equal(before[2], after[2])


def own_on_ranks(rank: int, root: str, names: tuple[str, str], rename: dict[str, str] | None, own: str) -> list[float]:
    """Each rank has a weight of its own, and momentum."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainState(model, optimizer, per_rank={f"{own}.*": lambda values, _rank, _size: values[-1]})
    with running(Path(root), kinds=("dcp",), timeout_s=60.0) as manager:
        start = manager.resume(state, rename=rename)
        if start is None:
            for at, name in enumerate(names, 1):
                weight = model[name].weight
                nn.init.constant_(weight, 10 * at + (rank if name == own else 0))
                optimizer.state[weight]["momentum_buffer"] = weight.detach() + 0.5
            manager.save(1, state).wait()
        else:
            assert not any("one value for all ranks" in line for line in start.missing)
    weights = [module.weight for module in model.values()]
    assert all(torch.equal(optimizer.state[weight]["momentum_buffer"], weight + 0.5) for weight in weights)
    return [float(weight[0, 0]) for weight in weights]


@pytest.mark.parametrize(
    ("names", "rename", "own", "found"),
    [
        (("n", "b"), {"a.*": "n.*"}, "n", ([10, 20], [11, 20])),
        (("a", "b"), {"a.*": "b.*", "b.*": "a.*"}, "b", ([20, 10], [20, 11])),
    ],
)
def test_what_each_rank_has_of_its_own_follows_its_new_name(
    names: tuple[str, str], rename: dict[str, str], own: str, found: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    run_ranks(2, own_on_ranks, str(tmp_path), ("a", "b"), None, "a")
    assert tuple(run_ranks(2, own_on_ranks, str(tmp_path), names, rename, own)) == found
    assert run_ranks(3, own_on_ranks, str(tmp_path), names, rename, own) == [found[1]] * 3


def exchanged_own(
    rank: int, root: str, own: dict[int, tuple[str, ...]], pairs: tuple[str, ...]
) -> list[dict[str, float]]:
    """Save, then exchange pairs of names in one start each; return this rank's weights after each start.

    Args:
        rank: The rank, which is also its stage if there is more than one.
        root: The root.
        own: For each stage, what each rank has of its own at each start.
        pairs: What is exchanged_own at each start, two letters each; "": no ``rename`` is given.
    """
    stage = rank if len(own) > 1 else None
    names = "abc" if stage is None else ("abc", "def")[stage]
    found = []
    for step, (pair, declared) in enumerate(zip(pairs, own[stage or 0], strict=True), 1):
        model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
        state = TrainState(model, per_rank=tuple(f"{name}.*" for name in declared))
        rename = {f"{one}.*": f"{other}.*" for one, other in (pair, pair[::-1])} if pair else None
        with running(Path(root), kinds=("dcp",), timeout_s=60.0, pp_rank=stage) as manager:
            if manager.resume(state, rename=rename) is None:
                for at, name in enumerate(names, 1):
                    nn.init.constant_(model[name].weight, at + 10 * rank * (name in declared))
            manager.save(step, state).wait()
        found.append({name: float(model[name].weight) for name in names})
    return found


@pytest.mark.parametrize(
    ("own", "pairs", "last"),
    [
        ({0: ("abc", "abc", "abc")}, ("", "ab", "bc"), [[2, 3, 1], [12, 13, 11]]),
        ({0: ("", "", "a")}, ("", "ab", "ab"), [[2, 1, 3]] * 2),
        ({0: ("a", "b", "b"), 1: ("f", "f", "f")}, ("", "ab", "ab"), [[2, 1, 3], [1, 2, 13]]),
    ],
    ids=["another exchange of them", "declared later", "of stages"],
)
def test_an_exchange_of_what_each_rank_has_of_its_own_is_done_once(
    own: dict[int, tuple[str, ...]], pairs: tuple[str, ...], last: list[list[int]], tmp_path: Path
) -> None:
    found = run_ranks(2, exchanged_own, str(tmp_path), own, pairs)
    assert [[*one[-1].values()] for one in found] == last


def on_other_ranks(
    rank: int, root: str, names: str, own: Any, wishes: dict[str, Any]
) -> tuple[str, dict[str, tuple[float, float]]]:
    """Save, or load what an earlier call saved; return the error, and this rank's weights with their momentum."""
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for module in model.values():
        nn.init.constant_(module.weight, -1.0)
        optimizer.state[module.weight]["momentum_buffer"] = torch.full((1, 1), -1.0)
    with running(Path(root), kinds=("dcp", "model"), timeout_s=60.0) as manager:
        state = TrainState(model, optimizer, per_rank=own)
        try:
            if manager.resume(state, **wishes) is None:
                for at, (name, module) in enumerate(model.items(), 1):
                    nn.init.constant_(module.weight, at + 10 * rank * (name == "a"))
                    optimizer.state[module.weight]["momentum_buffer"] = module.weight.detach() + 0.5
                manager.save(1, state).wait()
        except UsageError as error:
            return str(error.hint), {}
        weights = {name: module.weight for name, module in model.items()}
        moments = {name: optimizer.state.get(weight, {}) for name, weight in weights.items()}
        return "", {
            name: (float(weight), float(moments[name].get("momentum_buffer", 0.0))) for name, weight in weights.items()
        }


KEPT = {"b": (2.0, 2.5), "c": (3.0, 3.5)}


@pytest.mark.long
def test_a_module_of_which_each_rank_has_its_own_can_be_left_out(tmp_path: Path) -> None:
    rename, left = {"rename": {"a.*": "n.*"}}, {"exclude": ("model.n.*",)}
    run_ranks(2, on_other_ranks, str(tmp_path), "abc", ("a.*",), {})
    ((hint, _), *_) = run_ranks(3, on_other_ranks, str(tmp_path), "nbc", ("n.*",), rename)
    assert "per_rank={'n.weight': merge}" in hint
    assert 'exclude=("model.n.weight",)' in hint
    for ranks in (2, 3):
        for wishes in ({"exclude": ("model.a.*",)}, {"exclude": ("model.a.*",), "strict": False}):
            assert run_ranks(ranks, on_other_ranks, str(tmp_path), "bc", (), wishes) == [("", KEPT)] * ranks
        found = run_ranks(ranks, on_other_ranks, str(tmp_path), "nbc", ("n.*",), rename | left)
        assert [(error, weights["n"][0], weights["b"]) for error, weights in found] == [("", -1.0, KEPT["b"])] * ranks
        wishes = {"exclude": ("model.a.*",)}
        found = run_ranks(ranks, on_other_ranks, str(tmp_path), "abc", ("a.*",), wishes)
        assert [(error, weights["a"][0], weights["b"]) for error, weights in found] == [("", -1.0, KEPT["b"])] * ranks
    assert run_ranks(2, on_other_ranks, str(tmp_path), "bc", (), {"strict": False}) == [("", KEPT)] * 2
    assert run_ranks(2, on_other_ranks, str(tmp_path), "abc", ("a.*",), {})[1] == ("", {"a": (11.0, 11.5), **KEPT})


def staged(rank: int, root: str, names: tuple[str, str], wishes: dict[str, Any], *, snapshot: bool = False) -> str:
    """Resume and save, as one of two stages, perhaps a snapshot; return why not."""
    state = TrainState(nn.ModuleDict({name: nn.Linear(1, 1) for name in names[rank]}))
    with running(Path(root), kinds=("dcp",), timeout_s=60.0, pp_rank=rank) as manager:
        try:
            start = manager.resume(state, **wishes)
        except CkptMirrorError as error:
            return str(error)
        step = start.step + 1 if start is not None else 1
        if snapshot:
            manager.save_emergency_checkpoint(step, state)
        else:
            manager.save(step, state).wait()
        return ""


def test_a_pattern_that_fits_nothing_is_refused_beside_names_that_stay_in_every_stage(tmp_path: Path) -> None:
    kept, typo = {"rename": {"a.*": "n.*"}}, {"rename": {"bb.*": "p.*"}, "strict": False}
    assert run_ranks(2, staged, str(tmp_path), ("ab", "cd"), {}) == ["", ""]
    assert run_ranks(2, staged, str(tmp_path), ("nb", "cd"), kept) == ["", ""]
    assert run_ranks(2, staged, str(tmp_path), ("nb", "cd"), kept) == ["", ""]
    for error in run_ranks(2, staged, str(tmp_path), ("np", "cd"), typo):
        assert "rename holds 'bb.*', and the save has no tensor of that name" in error
    assert run_ranks(2, staged, str(tmp_path), ("b", "cd"), {**kept, "strict": False}) == ["", ""]
    assert run_ranks(2, staged, str(tmp_path), ("b", "cd"), kept) == ["", ""], "what was renamed has left the model"


def test_a_snapshot_of_stages_takes_a_rename_of_one_of_them(tmp_path: Path) -> None:
    snapshot = partial(staged, snapshot=True)
    assert run_ranks(2, staged, str(tmp_path), ("ab", "cd"), {}) == ["", ""]
    assert run_ranks(2, snapshot, str(tmp_path), ("ab", "cd"), {}) == ["", ""]
    for error in run_ranks(2, snapshot, str(tmp_path), ("nb", "cd"), {"rename": {"aa.*": "n.*"}}):
        assert "rename holds 'aa.*', and the save has no tensor of that name" in error
    for _ in range(2):
        assert run_ranks(2, snapshot, str(tmp_path), ("nb", "cd"), {"rename": {"a.*": "n.*"}}) == ["", ""]


def across(rank: int, root: str, names: tuple[str, str], wishes: dict[str, Any]) -> str | list[float]:
    """Resume and leave a snapshot, as one of two stages; return this rank's weights, or the error."""
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in names[rank]})
    with running(Path(root), kinds=("dcp",), timeout_s=60.0, pp_rank=rank) as manager:
        try:
            start = manager.resume(TrainState(model), **wishes)
        except CkptMirrorError as error:
            return str(error)
        if start is None:
            for at, module in enumerate(model.values(), 1):
                nn.init.constant_(module.weight, at + 10 * rank)
        step = start.step + 1 if start is not None else 1
        manager.save(step, TrainState(model)).wait()
        manager.save_emergency_checkpoint(step + 1, TrainState(model))
    return [float(module.weight) for module in model.values()]


def test_a_snapshot_takes_a_rename_across_stages(tmp_path: Path) -> None:
    first = run_ranks(2, across, str(tmp_path), ("ab", "cd"), {})
    assert first == [[1.0, 2.0], [11.0, 12.0]]
    for error in run_ranks(2, across, str(tmp_path), ("ab", "cd"), {"rename": {"a.*": "c.*"}, "strict": False}):
        assert "rename makes one name of" in error
    swapped = {"rename": {"a.*": "c.*", "c.*": "a.*"}}
    for _ in range(2):  # the second time it was done before
        assert run_ranks(2, across, str(tmp_path), ("ab", "cd"), swapped) == [[11.0, 2.0], [1.0, 12.0]]
