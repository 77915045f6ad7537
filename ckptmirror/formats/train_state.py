"""What a training loop hands over to be saved, and gets filled again by a load.

Rules:
* Nothing here imports torch: ``import ckptmirror`` stays light.
* Objects are held, never copied. Every one of them is optional, except the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """Everything that a resume needs.

    Attributes:
        model: A ``torch.nn.Module``, also wrapped by DDP, by ``torch.compile`` or sharded by ``fully_shard``.
        optimizer: A ``torch.optim.Optimizer``, or a list of them, over parameters of ``model``.
        scheduler: Anything with ``state_dict`` and ``load_state_dict``, or a list of such.
        scaler: A ``GradScaler``.
        ema: Shadow weights: a module, or anything with ``state_dict`` and ``load_state_dict``, or a list of such.
        dataloader: A data loader that knows its position (``state_dict``, ``load_state_dict``); others are left alone.
        extra: Values of your own: plain values, tensors (sharded ones too), arrays, objects with ``state_dict`` and
            ``load_state_dict``, and lists and dicts of these. A load writes back into this dict, tensors in place.
        training_config: Plain values that describe the run; they go into the meta.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None
    dataloader: Any = None
    extra: dict[str, Any] | None = None
    training_config: dict[str, Any] | None = None
