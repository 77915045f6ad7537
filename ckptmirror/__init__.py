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
    from ckptmirror.flow.handle import SaveHandle
    from ckptmirror.flow.load import LoadedCheckpoint, load_checkpoint
    from ckptmirror.flow.mirrors import MirrorSpec
    from ckptmirror.flow.resolve import (
        CheckpointReference,
        find_local_checkpoint_steps,
        list_checkpoints,
        resolve_checkpoint_reference,
        resolve_resume_path,
    )
    from ckptmirror.flow.resume import ResumeInfo
    from ckptmirror.flow.stage import StagedCheckpoint, stage_checkpoint_step
    from ckptmirror.formats.train_state import TrainState
    from ckptmirror.manager import CheckpointManager
    from ckptmirror.ranks.stop import StopRequest

__version__ = "0.1.0"

_HOMES = {
    "CheckpointManager": "ckptmirror.manager",
    "CheckpointReference": "ckptmirror.flow.resolve",
    "LoadedCheckpoint": "ckptmirror.flow.load",
    "MirrorSpec": "ckptmirror.flow.mirrors",
    "ResumeInfo": "ckptmirror.flow.resume",
    "Retention": "ckptmirror.core.retention",
    "SaveHandle": "ckptmirror.flow.handle",
    "StagedCheckpoint": "ckptmirror.flow.stage",
    "StopRequest": "ckptmirror.ranks.stop",
    "TrainState": "ckptmirror.formats.train_state",
    "find_local_checkpoint_steps": "ckptmirror.flow.resolve",
    "list_checkpoints": "ckptmirror.flow.resolve",
    "load_checkpoint": "ckptmirror.flow.load",
    "load_settings": "ckptmirror.config",
    "resolve_checkpoint_reference": "ckptmirror.flow.resolve",
    "resolve_resume_path": "ckptmirror.flow.resolve",
    "stage_checkpoint_step": "ckptmirror.flow.stage",
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
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ckptmirror.core.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ckptmirror' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
