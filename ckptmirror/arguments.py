"""Checks the arguments of ``CheckpointManager``'s methods, and converts them to the values of the inner layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptmirror.core import events, setting_checks, signing
from ckptmirror.core.errors import CkptMirrorError, ConfigError, UsageError
from ckptmirror.core.load_options import LoadOptions, check_given_alike
from ckptmirror.core.model import SAVED_KINDS, Kind
from ckptmirror.core.names import MAX_STEP
from ckptmirror.core.retention import Retention
from ckptmirror.core.setting_checks import WrongValue
from ckptmirror.core.stages import Stages
from ckptmirror.flow.places.mirrors import MirrorSpec, mirror_specs
from ckptmirror.local import directories
from ckptmirror.local.keys import use_keys
from ckptmirror.ranks import DEFAULT_TIMEOUT_S, Ranks, StopRequest, node_key_of, open_ranks
from ckptmirror.ranks.base import exchange_result

__all__ = [
    "Settings",
    "agreed_options",
    "check_alike",
    "check_kinds_of_stages",
    "checked_kinds",
    "checked_loss",
    "checked_settings",
    "checked_step",
    "node_key",
    "refuse",
    "stop_event",
]


@dataclass(frozen=True)
class Settings:
    """What a manager is given, as the inner layers take it."""

    root: Path
    specs: Sequence[MirrorSpec]
    kinds: tuple[Kind, ...]
    stage: int | None
    retention: Retention
    mode: Literal["async", "blocking"]
    state_dir: Path | None
    persistent_dir: Path | None
    workers_per_mirror: int
    timeout_s: float


def checked_settings(
    root: str | Path,
    mirrors: Iterable[str | MirrorSpec],
    *,
    kinds: Sequence[Kind],
    retention: Retention | None,
    pp_rank: int | None,
    mode: Literal["async", "blocking"],
    state_dir: str | Path | None,
    persistent_dir: str | Path | None,
    workers_per_mirror: int,
    timeout_s: float,
    signing_key: str | Path | None,
    verify_keys: Iterable[str | Path],
) -> Settings:
    """Check what a manager is given, and have this process use the keys.

    Raises:
        ConfigError: A setting is wrong.
    """
    before = signing.current()
    use_keys(signing_key, verify_keys)
    try:
        signing.check_can_sign()
    except ConfigError:
        signing.set_current(before)
        raise
    if retention is not None and not isinstance(retention, Retention):
        raise ConfigError(
            f"retention is {retention!r}; it must be a Retention.", hint="Write retention=Retention(keep_last=2)."
        )
    if mode not in ("async", "blocking"):
        raise ConfigError(f"mode is {mode!r}; it must be 'async' or 'blocking'.")
    try:
        setting_checks.whole(1)(workers_per_mirror)
    except WrongValue as error:
        raise ConfigError(f"workers_per_mirror {error.why}.", hint="Write workers_per_mirror=2.") from None
    all_kinds = checked_kinds(kinds)
    return Settings(
        root=directories.absolute_dir(root, "root"),
        specs=mirror_specs(mirrors),
        kinds=all_kinds,
        stage=_checked_stage(pp_rank, all_kinds),
        retention=retention or Retention(),
        mode=mode,
        state_dir=directories.absolute_dir(state_dir, "state_dir") if state_dir is not None else None,
        persistent_dir=(
            directories.absolute_dir(persistent_dir, "persistent_dir") if persistent_dir is not None else None
        ),
        workers_per_mirror=workers_per_mirror,
        timeout_s=_checked_limit(timeout_s),
    )


def refuse(error: BaseException, process_group: Any, timeout_s: float) -> None:
    """Tell the other ranks why this one opens nothing, so that they do not wait for it; the caller raises the error."""
    try:
        limit_s = _checked_limit(timeout_s)
    except ConfigError:
        limit_s = DEFAULT_TIMEOUT_S
    with suppress(CkptMirrorError):
        open_ranks(process_group, timeout_s=limit_s, error=error)


def node_key(root: Path) -> tuple[str, BaseException | None]:
    """Return a key that is equal on all ranks that share one root, however each spells its path, and any error.

    An error is returned and raised later, so that every rank still takes part in the first exchange.
    """
    try:
        directories.make_dirs(root)
        return node_key_of(root), None
    except (OSError, CkptMirrorError) as error:
        return str(root), error


def check_alike(settings: Sequence[Mapping[str, str] | None]) -> None:
    """Check that the nodes of a job have the same settings.

    Args:
        settings: Of each rank that leads a node: texts by name; None of the others.

    Raises:
        ConfigError: They differ; the message has both values.
    """
    of_nodes = [one for one in settings if one is not None]
    for node, theirs in enumerate(of_nodes):
        for name, first in of_nodes[0].items():
            if theirs.get(name) != first:
                raise ConfigError(
                    f"The nodes of this job differ in {name}: node 0 has {first or 'none'}, node {node} has "
                    f"{theirs.get(name) or 'none'}.",
                    hint="Start all nodes with the same ckptmirror and the same settings.",
                )


def agreed_options(
    ranks: Ranks, check: Callable[[], LoadOptions], *, what: str, stages: Stages, **others: object
) -> LoadOptions:
    """Check on every rank what a load is given, and that all were given the same. All ranks call this.

    Args:
        ranks: All ranks.
        check: Checks this rank's arguments, and returns the options of the load.
        what: What the ranks do here, for messages.
        stages: The stage of each rank.
        others: What else all ranks have to have alike, by name.

    Raises:
        UsageError: An argument of this rank is wrong, or two ranks have different ones.
        RankFailed: Another rank's is wrong.
    """
    options: list[LoadOptions] = []

    def checked() -> dict[str, str]:
        options.append(check())
        return {**{name: str(value) for name, value in others.items()}, **options[0].texts()}

    given = exchange_result(ranks, checked, what=what)
    check_given_alike(given, stages, ranks.nodes_of_ranks)
    return options[0]


def stop_event(stop: StopRequest, rank: int) -> events.StopRequested:
    """Return the event for a stop request."""
    left_s = stop.remaining_s
    if math.isinf(left_s):
        return events.StopRequested(reason=stop.reason or "", rank=rank)
    return events.StopRequested(reason=stop.reason or "", rank=rank, deadline_s=left_s, age_s=stop.grace_s - left_s)


def checked_kinds(kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    """Return the kinds to save, in order.

    Raises:
        ConfigError: They are not a sequence of kinds, each once.
    """
    are_several = isinstance(kinds, Sequence) and not isinstance(kinds, str)
    if not are_several or not kinds or len(set(kinds)) != len(kinds) or not set(kinds) <= set(SAVED_KINDS):
        raise ConfigError(
            f"kinds is {kinds!r}; it must be a tuple of {' and '.join(map(repr, SAVED_KINDS))}, or of one of them.",
            hint='Write kinds=("dcp",), for example.',
        )
    return tuple(kind for kind in SAVED_KINDS if kind in kinds)


def _checked_stage(pp_rank: int | None, kinds: Sequence[Kind]) -> int | None:
    """Return the number of a stage.

    Raises:
        ConfigError: It is not one, or the kinds cannot hold stages.
    """
    if pp_rank is None:
        return None
    if isinstance(pp_rank, bool) or not isinstance(pp_rank, int) or not 0 <= pp_rank < 1_000_000:
        raise ConfigError(f"pp_rank is {pp_rank!r}; it must be the number of a stage, from 0.")
    check_kinds_of_stages(kinds)
    return pp_rank


def check_kinds_of_stages(kinds: Sequence[Kind]) -> None:
    """Check that the kinds can hold a model in stages.

    Raises:
        ConfigError: One cannot.
    """
    if "model" in kinds:
        raise ConfigError(
            'Kind "model" is one file, which rank 0 writes; of a model in stages (pp_rank) no rank has all of it.',
            hint='Write kinds=("dcp",): the directory has the whole model, under the names of its layers.',
        )


def _checked_limit(timeout_s: float) -> float:
    """Return a limit in seconds.

    Raises:
        ConfigError: It is not a number above 0.
    """
    try:
        return setting_checks.above_0(timeout_s)
    except WrongValue as error:
        raise ConfigError(f"timeout_s {error.why} (seconds).", hint="Write timeout_s=600.0, for example.") from None


def checked_loss(loss: float) -> float:
    """Return a loss, which may be NaN or infinite.

    Raises:
        UsageError: It is not a number.
    """
    try:
        return float(loss)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
        raise UsageError(f"loss is a {type(loss).__name__}, not one number.", hint="Give loss.item().") from error


def checked_step(step: int) -> int:
    """Return a step to save at.

    Raises:
        UsageError: It is not a step.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise UsageError(
            f"{step!r} is not a step: give an int from 0 to {MAX_STEP}.", hint="Write manager.save(int(step), state)."
        )
    return step
