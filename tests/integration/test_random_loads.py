"""Random changes of a model, of its stages and of the number of ranks between a save and a load, of every kind.

A reference, which shares nothing with the package, says what each rank has to have afterwards, value and moment, or
that every rank gets an error; on another number of ranks, nothing has changed then. A module has one letter and value.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptmirror import CheckpointManager, TrainState
from ckptmirror.core.errors import CkptMirrorError, LoadDiffers
from tests.kit.processes import run_ranks
from tests.kit.training import running

pytestmark = pytest.mark.long

FULL = os.environ.get("CKPTMIRROR_CAMPAIGN") == "full"
SEED = int(os.environ.get("CKPTMIRROR_CAMPAIGN_SEED") or random.SystemRandom().randrange(1_000_000))
ROUNDS = 100 if FULL else 3
CASES = 24
AS_BUILT = (-1.0, None)
SPLITS = [(0, 1), (0, 0, 1, 1), (0, 1, 0, 1)]

Had = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Model:
    """A model over ranks.

    Attributes:
        stage_of: The stage of each rank.
        names: The modules of each stage.
        own: Those of which each rank has values of its own.
        merges: Those of these for which a function merges the values.
        idle: Modules of a rank that got no data, so that its optimizer has nothing of them, as name and rank.
    """

    stage_of: tuple[int, ...]
    names: tuple[str, ...]
    own: str = ""
    merges: str = ""
    idle: tuple[tuple[str, int], ...] = ()

    def of(self, rank: int) -> str:
        return self.names[self.stage_of[rank]]

    def holders(self, name: str) -> list[int]:
        return [rank for rank in range(len(self.stage_of)) if name in self.of(rank)]


@dataclass(frozen=True)
class Case:
    """A load: the model, the kind of the save, and the arguments."""

    now: Model
    kind: str
    rename: Mapping[str, str]
    exclude: str
    strict: bool

    def arguments(self) -> dict[str, Any]:
        return {
            "rename": {f"{old}.*": f"{new}.*" for old, new in self.rename.items()},
            "exclude": tuple(f"model.{name}.*" for name in self.exclude),
            "strict": self.strict,
        }


# -- the reference ------------------------------------------------------------------------------------------


def value_of(name: str, rank: int, own: str) -> float:
    return ord(name) + (1000.0 * (rank + 1) if name in own else 0.0)


def expected(then: Model, case: Case) -> list[Had] | None:
    """What each rank has after the load; None: all are refused."""
    now, same_number = case.now, len(then.stage_of) == len(case.now.stage_of)
    saved = "".join(then.names)
    new = {name: case.rename.get(name, name) for name in saved}
    here, there = set("".join(now.names)), set(new.values())
    if len(there) < len(new) or (case.strict and (here ^ there) - set(case.exclude)):
        return None
    for name in {*then.own}.intersection(saved):
        called = new[name]
        is_gone = called not in here and same_number  # else one has to say so with `exclude`
        may = then.holders(name) == now.holders(called) if same_number else called in now.merges
        if not (may or is_gone or called in case.exclude):
            return None
    old = {called: name for name, called in new.items()}

    def had(rank: int, called: str) -> tuple[float, float | None]:
        if called in case.exclude or called not in old:
            return AS_BUILT
        name, ranks = old[called], then.holders(old[called])
        held = [(one, value_of(name, one, then.own)) for one in ranks]
        moments = {one: value / 10 for one, value in held if (name, one) not in then.idle}
        values = dict(held)
        if name not in then.own:
            return values[ranks[0]], moments[ranks[0]]
        if same_number:
            return values[rank], moments.get(rank)
        average = sum(moments.values()) / len(moments) + rank if moments else None
        return sum(values.values()) / len(values) + rank, average

    return [{name: had(rank, name) for name in now.of(rank)} for rank in range(len(now.stage_of))]


# -- what is played -----------------------------------------------------------------------------------------


def a_model(chance: random.Random) -> Model:
    model = with_values(chance)
    idle = [(name, chance.choice(model.holders(name))) for name in model.own if chance.random() < 0.4]
    return replace(model, idle=tuple(idle))


def with_values(chance: random.Random) -> Model:
    if chance.random() < 0.6:
        names = ("abe", "cdf")
        return Model(chance.choice(SPLITS), names, "".join(chance.sample("".join(names), chance.choice([0, 1, 2]))))
    ranks = chance.choice([1, 2, 2, 3])
    return Model(
        (0,) * ranks, ("abcde",), "".join(chance.sample("abcde", chance.choice([0, 1, 2]))) if ranks > 1 else ""
    )


def a_case(chance: random.Random, then: Model, stage_of: tuple[int, ...]) -> Case:
    names, every = list(then.names), "".join(then.names)
    chosen = chance.sample(every, 3)
    rename = chance.choice([
        {},
        {chosen[0]: "n"},
        {chosen[0]: chosen[1], chosen[1]: chosen[0]},
        dict(zip(chosen, [*chosen[1:], chosen[0]], strict=True)),
    ])  # fmt: skip
    if chance.random() < 0.7:  # modules keep their places, and get the names
        names = ["".join(rename.get(name, name) for name in of_stage) for of_stage in names]
    elif "n" in rename.values():  # on any stage
        at = chance.randrange(len(names))
        names = [of_stage.replace(chosen[0], "") + "n" * (number == at) for number, of_stage in enumerate(names)]
    own = [rename.get(name, name) for name in then.own]
    if not any(stage_of):  # without stages
        names = ["".join(names)]
    at, change, exclude = chance.randrange(len(names)), chance.choice(["", "adds", "takes", "takes all", "leaves"]), ""
    if change == "adds":
        names[at] += "z"
        exclude = chance.choice(["z", ""])
    elif change == "takes" and len(names[at]) > 1:
        gone = chance.choice(names[at])
        names[at] = names[at].replace(gone, "")
        exclude = chance.choice([gone, ""])
    elif change == "takes all" and len(names) < len(then.names):  # of what a stage had
        gone = "".join(rename.get(name, name) for name in chance.choice(then.names))
        names = ["".join(name for name in names[0] if name not in gone)]
        exclude = chance.choice([gone, ""])
    elif change == "leaves":
        exclude = chance.choice("".join(names))
    own = [name for name in own if name in "".join(names)]
    now = Model(stage_of, tuple(names), "".join(own), "".join(own) if chance.random() < 0.5 else "")
    kinds = ["dcp", "model", "emergency"] if len(then.names) == 1 else ["dcp", "emergency"]
    return Case(now, chance.choice(kinds), rename, exclude, strict=chance.random() < 0.5)


def a_job_for(chance: random.Random, then: Model) -> tuple[int, ...]:
    if len(then.names) == 1:
        return (0,) * chance.choice([len(then.stage_of), 1, 2, 3])
    return then.stage_of if chance.random() < 0.6 else chance.choice([*SPLITS, (0, 0, 0, 0), (0, 0)])


def mean(values: list[Any], rank: int, _world_size: int) -> torch.Tensor | None:
    there = [torch.as_tensor(value).float() for value in values if value is not None]
    return torch.stack(there).mean(0) + rank if there else None


def built(model: Model, rank: int) -> TrainState:
    modules = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in model.of(rank)})
    for value in modules.parameters():
        nn.init.constant_(value, AS_BUILT[0])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.0, weight_decay=0.0)
    own = [name for name in model.own if name in modules]
    merges = {f"{name}.*": mean if name in model.merges else None for name in own}
    return TrainState(modules, optimizer, per_rank=merges if model.merges else tuple(merges))


def held(state: TrainState) -> Had:
    moments = {name: state.optimizer.state[module.weight].get("exp_avg") for name, module in state.model.items()}
    return {
        name: (float(module.weight.detach()), None if moments[name] is None else round(float(moments[name]), 3))
        for name, module in state.model.items()
    }


def manager_of(base: Path, model: Model, rank: int) -> Any:
    stages = {"pp_rank": model.stage_of[rank]} if len(model.names) > 1 else {}
    return running(base, kinds=("dcp",), timeout_s=60.0, **stages)


def save_all_kinds(rank: int, base: Path, model: Model) -> None:
    state = built(model, rank)
    for name, module in state.model.items():
        value = value_of(name, rank, model.own)
        nn.init.constant_(module.weight, value)
        if (name, rank) in model.idle:
            continue
        module.weight.grad = torch.full_like(module.weight, value)
    with manager_of(base, model, rank) as manager:
        manager.resume(built(model, rank))
        state.optimizer.step()
        manager.save(1, state).wait()
        if len(model.names) == 1:
            manager.save(2, state, kinds=("model",)).wait()
        manager.save_emergency_checkpoint(3, state)


def load_each(rank: int, base: Path, then: Model, cases: list[Case]) -> list[Had | str]:
    found: list[Had | str] = []
    with manager_of(base, cases[0].now, rank) as manager:
        for case in cases:
            state = built(case.now, rank)
            try:
                _load(manager, state, case)
            except CkptMirrorError as error:
                may_change = len(then.stage_of) == len(case.now.stage_of) or isinstance(error, LoadDiffers)
                is_refused = may_change or {*held(state).values()} <= {AS_BUILT}
                found.append(f"{type(error).__name__}: {error}" if is_refused else f"changed: {held(state)}")
            else:
                found.append(held(state))
    return found


def _load(manager: CheckpointManager, state: TrainState, case: Case) -> None:
    if case.kind == "emergency":
        manager.resume(state, **case.arguments())
    else:
        manager.load(state, {"dcp": 1, "model": 2}[case.kind], **case.arguments())


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_rank_has_what_it_saved_under_its_new_name_or_all_are_refused(tmp_path: Path, number: int) -> None:
    chance = random.Random(f"{SEED} {number}")
    then = a_model(chance)
    now = a_job_for(chance, then)
    cases = [a_case(chance, then, now) for _ in range(CASES)]
    run_ranks(len(then.stage_of), save_all_kinds, tmp_path, then)
    found = run_ranks(len(now), load_each, tmp_path, then, cases)
    wrong = []
    for case, *of_ranks in zip(cases, *found, strict=True):
        due = expected(then, case)
        is_refused = all(isinstance(one, str) and not one.startswith("changed") for one in of_ranks)
        if not is_refused if due is None else of_ranks != [_rounded(one) for one in due]:
            wrong.append(f"{then} -> {case}\n  found {of_ranks}\n  due {due}")
    assert not wrong, f"CKPTMIRROR_CAMPAIGN_SEED={SEED}:\n" + "\n".join(wrong)


def _rounded(had: Had) -> Had:
    return {name: (value, None if moment is None else round(moment, 3)) for name, (value, moment) in had.items()}
