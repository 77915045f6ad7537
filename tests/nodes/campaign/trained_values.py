"""A model whose every number says which save it is of: a mix of two saves, or of two places in a tensor, shows.

Rules:
* A number is ``code * 64 + its place in the tensor``; the code is that of a job and a step. Integers, so that they are
  exact in float32 and the same on any number of ranks.
* The optimizer's momentum is the negative of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckptmirror import TrainState

__all__ = ["PLACES", "Trained", "code_of"]

PLACES = 64
_STEPS = 100


def code_of(job: int, step: int) -> int:
    """The code of what a job had trained by a step."""
    assert step < _STEPS
    return job * _STEPS + step


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class Trained:
    """A rank's part of the model, its optimizer, and the places of its numbers.

    Attributes:
        places: Of each parameter and buffer, by name, the place of each of this rank's numbers in the whole tensor.
    """

    state: TrainState
    places: dict[str, torch.Tensor]

    @classmethod
    def build(cls, wrapped: str, job: int) -> Trained:
        model: Any = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 5))
        model.register_buffer("seen", torch.zeros(4))
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(torch.arange(float(tensor.numel())).view(tensor.shape))
        if wrapped == "fsdp":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5, foreach=False)
        state = TrainState(model=model, optimizer=optimizer, extra={}, training_config={"job": job})
        return cls(state, {name: _local(tensor.detach()).clone() for name, tensor in _named(model)})

    def train(self, code: int, rank: int) -> None:
        """Make every number that of a code."""
        model, optimizer = self.state.model, self.state.optimizer
        if not optimizer.state:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, tensor in _named(model):
                _local(tensor).copy_(self.places[name] + code * PLACES)
                if tensor in optimizer.state:
                    _local(optimizer.state[tensor]["momentum_buffer"]).copy_(-self.places[name] - code * PLACES)
        self.state.extra = {"code": code, "rank": rank}

    def codes(self) -> dict[str, list[float]]:
        """The codes of this rank's numbers, by tensor.

        There are several where saves are mixed, and one with a fraction where a number is in another's place.
        """
        found = {}
        with torch.no_grad():
            for name, tensor in _named(self.state.model):
                found[name] = _codes(_local(tensor), self.places[name])
                if tensor in self.state.optimizer.state:
                    momentum = self.state.optimizer.state[tensor]["momentum_buffer"]
                    found[f"momentum of {name}"] = _codes(-_local(momentum), self.places[name])
        return found


def _named(model: Any) -> list[tuple[str, Any]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _codes(values: torch.Tensor, places: torch.Tensor) -> list[float]:
    return sorted(set(((values - places) / PLACES).flatten().tolist()))
