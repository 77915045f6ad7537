"""Makes the checkpoints of writers before ckptmirror, by plain torch: no bytes kept in the repository, none of ours.

Rules:
* Nothing here imports ckptmirror, so that what is read back is what torch wrote.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict


def make_training(seed: int = 0, steps: int = 3, *, scheduled: bool = True) -> tuple[nn.Module, Any, Any]:
    """A model, its AdamW and its scheduler, after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2) if scheduled else None
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 4), 0.1 * (step + 1))).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model, optimizer, scheduler


def named(model: nn.Module, *optimizers: Any) -> dict[str, Any]:
    """The state of a model and its optimizers by name, as torch's own DCP recipes have it."""
    keys = ["optimizer", *(f"optimizer_{number}" for number in range(1, len(optimizers)))]
    of_optimizers = {key: get_optimizer_state_dict(model, one) for key, one in zip(keys, optimizers, strict=False)}
    return {"model": get_model_state_dict(model), **of_optimizers}


def save_dcp(directory: Path, tree: Mapping[str, Any]) -> Path:
    """A plain ``torch.distributed.checkpoint.save`` of one process."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(tree), checkpoint_id=directory, no_dist=True)
    return directory


def write_meta(place: Path, **values: Any) -> None:
    """A ``meta.json`` of free JSON, in a DCP directory or beside it."""
    (place / "meta.json").write_text(json.dumps(values))


def save_legacy(root: Path, step: int, name: str = "", *, seed: int = 0, inside: bool = True) -> dict[str, Any]:
    """A whole older checkpoint of one step: DCP, ``meta.json``, extra state; return what was saved."""
    model, optimizer, scheduler = make_training(seed, steps=3)
    tree = named(model, optimizer)
    directory = save_dcp(root / (name or f"dist_ckpt_{step:06d}"), tree)
    place = directory if inside else root
    write_meta(place, step=step, config={"width": 6}, metrics={"val_loss": 1.5, "note": "x"}, run="old")
    extra = {"scheduler": scheduler.state_dict(), "epoch": 7, "torch_rng_state": torch.get_rng_state()}
    torch.save(extra, place / "extra_state.pt" if inside else root / f"extra_{step:06d}.pt")
    return {**tree, "scheduler": scheduler.state_dict(), "epoch": 7}
