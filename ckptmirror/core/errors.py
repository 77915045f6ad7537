"""Every error that ckptmirror raises on purpose: one tree, with exit codes and hints.

Rules:
* The class docstring's first line is the default message; an instance may say more.
* ``exit_code`` is what the CLI exits with (the table in docs/reference/exit-codes.md is checked against it).
* ``hint`` names the next command or action; an instance may replace it.
* A message holds no character that controls a terminal, since it may quote names and answers from elsewhere.
* The class says whether an operation may be retried (``temporary``); nobody guesses it from a message.
* It also says whether the local disk had no room (``lacks_room``); both are known for another rank's error too.
"""

from __future__ import annotations

from typing import ClassVar

from ckptmirror.core.printable import printable_line

__all__ = [
    "AttemptFenced",
    "BackgroundSaveFailed",
    "BrokenMeta",
    "BrokenTable",
    "BucketNotFound",
    "CheckpointNotFound",
    "CkptMirrorError",
    "ClaimLost",
    "ConfigError",
    "DataChanged",
    "DeadlinePassed",
    "DestinationOccupied",
    "ForeignTable",
    "IllegalTransition",
    "IntegrityError",
    "KindMismatch",
    "LineageError",
    "LoadDiffers",
    "LocalStorageFull",
    "LocalStorageUnwritable",
    "NameTaken",
    "NewerFormat",
    "NewerTable",
    "NoTable",
    "NodeBehind",
    "NotAuthorised",
    "NotSigned",
    "ObjectNotFound",
    "PreconditionFailed",
    "RankFailed",
    "RanksDiffer",
    "RefusedOnlyCopy",
    "RootLocked",
    "StepBehind",
    "StoreHangs",
    "StorePermanent",
    "StoreTemporary",
    "TableLocked",
    "Temporary",
    "UnsafePickle",
    "UsageError",
    "WaitTimeout",
]


class CkptMirrorError(Exception):
    """Something unexpected happened in ckptmirror."""

    exit_code: ClassVar[int] = 1
    temporary: ClassVar[bool] = False
    lacks_room: ClassVar[bool] = False
    is_seen: ClassVar[bool] = False  # whether a caller has this error, on this rank or another
    hint: str = "Run the same command again with --verbose and report what it prints."
    says_who: bool = False

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        doc = (type(self).__doc__ or "").strip().splitlines()
        self.message = printable_line(message if message is not None else doc[0])
        super().__init__(self.message)
        self.hint = hint if hint is not None else self.hint

    def __setattr__(self, name: str, value: object) -> None:
        """Let a traceback end with the hint, which is the next command, as the CLI's output does."""
        if name == "hint":
            self.__notes__ = [str(value), *getattr(self, "__notes__", ())[1:]]
        super().__setattr__(name, value)

    def put_in_front(self, who: str) -> None:
        """Let the message begin with who failed, for example a rank and its node; the first call counts."""
        if not self.says_who:
            self.says_who = True
            self.message = f"{who}: {self.message}"
            self.args = (self.message,)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the message, hint and plain attributes, so that errors can travel between ranks."""
        plain = {key: value for key, value in vars(self).items() if isinstance(value, str | int | float | None)}
        return (_rebuild, (type(self), self.message, self.hint), plain)


def _rebuild(cls: type[CkptMirrorError], message: str, hint: str) -> CkptMirrorError:
    return cls(message, hint=hint)


# -- what the caller asked for ------------------------------------------------------------------------------


class UsageError(CkptMirrorError):
    """The call or command line cannot be understood."""

    exit_code = 2
    hint = "Give what the message asks for: the documentation of the function lists its arguments."


class CheckpointNotFound(CkptMirrorError):
    """There is no such checkpoint."""

    exit_code = 3
    hint = "List what there is with `ckptmirror ls`."


class KindMismatch(CkptMirrorError):
    """The step exists, but not in the kind that was asked for."""

    exit_code = 4
    hint = "List the kinds of each step with `ckptmirror ls`."


class ConfigError(CkptMirrorError):
    """A setting is missing or wrong."""

    exit_code = 10
    hint = "Correct the option or setting that it names."


class NoTable(ConfigError):
    """This directory has no pending-uploads table, so ckptmirror has not saved here."""

    hint = "Give the directory that the trainer saves to."


class NewerTable(ConfigError):
    """The pending-uploads table was written by a newer version of ckptmirror."""

    hint = "Use that newer version here; the table was not changed."


class ForeignTable(ConfigError):
    """The pending-uploads table belongs to another root or another run."""

    hint = "Give each root a state_dir of its own."


class StepBehind(UsageError):
    """A save at a lower step than this attempt's last save is a rewind, which needs a new attempt."""

    hint = "Start again with manager.resume(state, policy=<step or reference>)."


class DataChanged(UsageError):
    """The data is not the data whose position was saved."""

    hint = 'Bring back the data as it was, or start it from its beginning: exclude=("dataloader",).'


class LoadDiffers(UsageError):
    """After a load, a value in memory is not what was saved, although the bytes on the disk are right."""

    hint = (
        "The code that takes the state has changed it, or has left something out: a load_state_dict, a hook of the "
        "model or the optimizer. If it does so on purpose: resume(verify_loaded=False)."
    )


class RanksDiffer(UsageError):
    """Ranks hold different values under one name, and a save keeps one of them."""

    hint = (
        "If the ranks should hold the same, broadcast rank 0's values before save(). If each has its own (experts), "
        'declare it, TrainState(per_rank=("experts.*",)), or make them shards of one DTensor. If groups of ranks have '
        "models of their own, give each group a manager with its own process_group and root."
    )


# -- whether bytes and structures can be trusted -------------------------------------------------------------


class IntegrityError(CkptMirrorError):
    """What was read is not what was saved."""

    exit_code = 6
    hint = "`ckptmirror verify` says what is damaged, and what repairs it."


class BrokenMeta(IntegrityError):
    """A meta file is not valid."""


class NotSigned(BrokenMeta):
    """A document lacks the signature that ``verify_keys`` demands."""

    hint = "If it is yours, add the key that signed it to verify_keys, or sign the run first: docs/security.md."


class NewerFormat(BrokenMeta):
    """A file was written by a later version of ckptmirror than this one; it is not broken, and is never replaced."""

    hint = "A newer ckptmirror wrote it: use that one."


class BrokenTable(IntegrityError):
    """The pending-uploads table, or one of its rows, is damaged."""

    hint = (
        "The next start of the trainer moves the table aside and rebuilds it. Until then, ckptmirror deletes nothing."
    )


class UnsafePickle(IntegrityError):
    """A file asks to load something that is not on the allow-list."""

    hint = "Do not load this file: checkpoints need tensors and plain values only."


class LineageError(IntegrityError):
    """The list of attempts contradicts itself."""

    hint = "Compare .ckptmirror/attempts.json with writer.json on the mirror."


class IllegalTransition(CkptMirrorError):
    """An upload record cannot go from its state to the state that was asked for."""


# -- who else is here ----------------------------------------------------------------------------------------


class RootLocked(CkptMirrorError):
    """Another live process writes to this root."""

    exit_code = 11
    hint = "Stop that process, or use another directory."


class TableLocked(CkptMirrorError):
    """The pending-uploads table is locked by another process."""

    exit_code = 11
    temporary = True
    hint = "Try again in a moment: no process holds it for long."


class ClaimLost(CkptMirrorError):
    """Another worker holds this upload record now, so this one changed nothing."""

    hint = "Nothing is wrong: another worker now handles the record."


class AttemptFenced(CkptMirrorError):
    """A newer attempt of this run has started, so this one commits nothing more."""

    exit_code = 7
    hint = "Stop this process. If no newer attempt runs, start the run again: it continues from what is committed."


class NameTaken(CkptMirrorError):
    """A path that should be created already exists."""

    exit_code = 7
    hint = "Nothing was replaced. Look at what is there with `ckptmirror ls`."


class DestinationOccupied(NameTaken):
    """The destination holds files that ckptmirror did not put there."""

    hint = "Choose an empty --dest, or move the files away."


class RefusedOnlyCopy(CkptMirrorError):
    """Refused: this may be the only copy."""

    exit_code = 7
    hint = "See why with `ckptmirror status`; finish the uploads with `ckptmirror drain`."


# -- temporary conditions ------------------------------------------------------------------------------------


class Temporary(CkptMirrorError):
    """A condition that may pass by itself."""

    exit_code = 5
    temporary = True
    hint = "Try the same command again."


class NodeBehind(CkptMirrorError):
    """What this save waits for on a mirror is not there yet: a part or the meta of another node, or a newer save.

    Attributes:
        writes_for_s: How long another node may need for what it is about to write; 0 if it may not have begun.
    """

    exit_code = 8
    writes_for_s = 0.0
    hint = (
        "It does so by itself. If that node's disk is gone, the save becomes whole only if another mirror has it: "
        "`ckptmirror stage --step N --full` from that one into this root, then `ckptmirror drain`."
    )


class WaitTimeout(Temporary):
    """A wait reached its limit."""


class DeadlinePassed(CkptMirrorError):
    """The deadline passed with uploads pending."""

    exit_code = 8
    hint = "Finish the uploads with `ckptmirror drain`."


class RankFailed(CkptMirrorError):
    """Another rank failed, so this one cannot continue.

    Attributes:
        is_death: Whether that rank's process ended, or raised an error that is not ckptmirror's.
    """

    is_death = False
    hint = "Read the first error in the log of that rank."


class BackgroundSaveFailed(CkptMirrorError):
    """An earlier save failed in the background."""

    is_seen = True
    hint = "The training state is intact: fix the cause, and let all ranks save again."


# -- the local disk ------------------------------------------------------------------------------------------


class LocalStorageFull(Temporary):
    """The local disk is full (no space or no inodes)."""

    lacks_room = True
    hint = "Free space on that disk. In a trainer's root, see `ckptmirror status` and `ckptmirror rotate --dry-run`."


class LocalStorageUnwritable(ConfigError):
    """The root cannot be written."""

    hint = "Check that the directory exists, is yours, and is not mounted read-only."


# -- stores --------------------------------------------------------------------------------------------------


class StoreTemporary(Temporary):
    """The mirror did not answer, or answered that it is busy."""

    retry_after_s: float | None = None

    hint = "Check the network and the mirror's URL, then try again; what was done is not lost."


class StoreHangs(StoreTemporary):
    """The file system of a mirror or of the persistent directory hangs."""

    hint = "Find out with `mount` and `stat` which server it needs: it may be down."


class StorePermanent(CkptMirrorError):
    """The mirror refused the request, and would refuse it again."""

    hint = "Check the mirror's URL and what the mirror says."


class ObjectNotFound(StorePermanent):
    """There is no such object on the mirror."""

    exit_code = 3


class BucketNotFound(StorePermanent):
    """There is no such bucket."""

    exit_code = 10
    hint = "Correct the mirror's URL, or create the bucket."


class PreconditionFailed(StorePermanent):
    """The object on the mirror is not in the state that the request required."""

    exit_code = 7


class NotAuthorised(CkptMirrorError):
    """The mirror does not accept these credentials."""

    exit_code = 12
    hint = "Log in (`gcloud auth application-default login`), or have the bucket's permissions changed; then try again."
