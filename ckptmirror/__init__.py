"""ckptmirror mirrors PyTorch checkpoints from fast local SSD to object storage, and never deletes the only copy.

Importing this package imports neither torch nor a cloud client: names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptmirror.config import load_settings
    from ckptmirror.core import errors
    from ckptmirror.core.retention import Retention
    from ckptmirror.flow.fetch.load import LoadedCheckpoint, load_checkpoint
    from ckptmirror.flow.fetch.load_state import ResumeInfo
    from ckptmirror.flow.fetch.stage import StagedCheckpoint, stage_checkpoint_step
    from ckptmirror.flow.places.mirrors import MirrorSpec
    from ckptmirror.flow.places.resolve import (
        CheckpointReference,
        find_local_checkpoint_steps,
        list_checkpoints,
        resolve_checkpoint_reference,
        resolve_resume_path,
    )
    from ckptmirror.flow.save.handle import SaveHandle
    from ckptmirror.formats.train_state import TrainState
    from ckptmirror.local.keys import use_keys
    from ckptmirror.manager import CheckpointManager
    from ckptmirror.ranks.stop import StopRequest

__version__ = "0.1.0"

_HOMES = {
    "CheckpointManager": "ckptmirror.manager",
    "CheckpointReference": "ckptmirror.flow.places.resolve",
    "LoadedCheckpoint": "ckptmirror.flow.fetch.load",
    "MirrorSpec": "ckptmirror.flow.places.mirrors",
    "ResumeInfo": "ckptmirror.flow.fetch.load_state",
    "Retention": "ckptmirror.core.retention",
    "SaveHandle": "ckptmirror.flow.save.handle",
    "StagedCheckpoint": "ckptmirror.flow.fetch.stage",
    "StopRequest": "ckptmirror.ranks.stop",
    "TrainState": "ckptmirror.formats.train_state",
    "find_local_checkpoint_steps": "ckptmirror.flow.places.resolve",
    "list_checkpoints": "ckptmirror.flow.places.resolve",
    "load_checkpoint": "ckptmirror.flow.fetch.load",
    "load_settings": "ckptmirror.config",
    "resolve_checkpoint_reference": "ckptmirror.flow.places.resolve",
    "resolve_resume_path": "ckptmirror.flow.places.resolve",
    "stage_checkpoint_step": "ckptmirror.flow.fetch.stage",
    "use_keys": "ckptmirror.local.keys",
}

__all__ = [
    "CheckpointManager",
    "CheckpointReference",
    "LoadedCheckpoint",
    "MirrorSpec",
    "ResumeInfo",
    "Retention",
    "SaveHandle",
    "StagedCheckpoint",
    "StopRequest",
    "TrainState",
    "errors",
    "find_local_checkpoint_steps",
    "list_checkpoints",
    "load_checkpoint",
    "load_settings",
    "resolve_checkpoint_reference",
    "resolve_resume_path",
    "stage_checkpoint_step",
    "use_keys",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ckptmirror.core.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ckptmirror' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
