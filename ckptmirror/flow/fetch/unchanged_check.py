"""Checks once more, before training changes it or saves it, that memory holds what a resume loaded.

Between a resume and the first step, a program may initialise its model again, load other weights into it, or build a
new optimizer. Every save after that would hold something else than the continuation of the run.

Rules:
* It is done once: before the first step of an optimizer that holds a parameter of the model, or else in the first save.
* Each rank compares its own shards with the sums that it had at the resume. No rank is asked: others may be elsewhere.
* Compared are parameters and optimizer state, from the objects themselves: no ``state_dict`` is called before a step,
  as a sharded model may be in the middle of its backward pass. A forward pass may change buffers, and averages move.
* A change of a parameter that requires a gradient and is not as small as one of training is an error. Layers that
  normalise their weights in the forward pass change them by about one step: that, and a frozen parameter, is a warning.
* Optimizers with a mode for training and one for evaluation (``train()``) move the parameters when it is switched.
* In the first save, nobody has seen a step. Changed parameters are an error if the optimizer's state is what was
  loaded; if that has moved on, something steps that cannot be seen (compiled, or no ``torch.optim.Optimizer``).
* What goes wrong in the check itself never stops a training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

from ckptmirror.core.errors import LoadDiffers
from ckptmirror.core.tensor_proof import Summed, changed
from ckptmirror.local.daemon_pool import cores
from ckptmirror.local.save_logger import save_logger
from ckptmirror.ranks.base import Ranks

if TYPE_CHECKING:
    from ckptmirror.formats.train_state import TrainState

__all__ = ["UnchangedCheck", "unchanged_check"]

_log = logging.getLogger("ckptmirror.load")
_SAMPLE = 64  # values of each parameter that are kept
_SMALL_CHANGE = 0.1  # of the sample's norm
_STATE = "optimizer.state."
_HINT = (
    "Before manager.resume(state): initialise and wrap the model, load other weights into it, and build the optimizer. "
    "If what happened after it is meant: resume(verify_loaded=False)."
)


class UnchangedCheck:
    """Waits for the first step after a resume.

    Args:
        state: What was loaded into.
        loaded: The sums of this rank's tensors at the end of the load.
        step: Of the save.
        ranks: The ranks of the job; only the number of this one is used.
    """

    def __init__(self, state: TrainState, loaded: Iterable[Summed], step: int, ranks: Ranks) -> None:
        from ckptmirror.sums.step_watch import before_steps

        self._step, self._rank = step, ranks.rank
        self._refused: LoadDiffers | None = None
        self._is_over = False
        self._remove: Callable[[], None] | None = None
        self._model, self._optimizers = ref(state.model), [ref(one) for one in _optimizers_of(state)]
        self._parameters: dict[str, ReferenceType[Any]] = {}  # each under its first name
        live = _first_names(state)
        seen = _memory_in_saves(state)
        mine = {name: tensor for name, tensor in self._tensors(live, self._there()) if _is_at(tensor, seen.get(name))}
        self._loaded = [one for one in loaded if one.name in mine]
        kept = {one.name for one in self._loaded}
        self._parameters = {name: ref(one) for name, one in live.items()}
        self._samples = {name: _sample(one) for name, one in live.items() if f"model.{name}" in kept}
        if self._loaded:
            self._remove = before_steps(self._look)

    def end(self) -> None:
        """Stop waiting."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def before_save(self, state: TrainState) -> None:
        """Check what is about to be saved, if there was no step since the resume.

        Raises:
            LoadDiffers: It is not what was loaded, or was not before the first step.
        """
        self.end()
        if not self._is_over:
            self._is_over = True
            self._try(self._check_save, state)
        if self._refused is not None:
            raise LoadDiffers(self._refused.message, hint=self._refused.hint)

    def _look(self, optimizer: Any) -> None:
        if not self._is_over:
            self._try(self._check_step, optimizer)

    def _try(self, check: Callable[[Any], None], subject: Any) -> None:
        try:
            check(subject)
        except LoadDiffers as error:
            self._refused = error
            raise
        except Exception as error:  # noqa: BLE001 - the user's objects may do anything; a training must not stop by this
            self._is_over = True
            _log.debug("what a resume loaded could not be compared with what training begins with: %s", error)

    def _there(self) -> list[Any]:
        return [one for one in (reference() for reference in self._optimizers) if one is not None]

    def _check_step(self, optimizer: Any) -> None:
        parameters = {name: one for name, one in ((n, r()) for n, r in self._parameters.items()) if one is not None}
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        ours = self._there()
        is_ours = any(one is optimizer or one.state is optimizer.state for one in ours)
        if not is_ours and held.isdisjoint(map(id, parameters.values())):
            return  # of another model
        self._is_over = True
        if not is_ours:
            self._refuse_rebuilt(optimizer, ours, parameters, held)
        compared = {} if _swaps([optimizer, *ours]) else parameters
        names = self._changed(self._tensors(parameters, ours if is_ours else []), without_state=not is_ours)
        of_state = [name for name in names if name.startswith(_STATE)]
        of_model = [name for name in names if name.removeprefix("model.") in compared]
        self._refuse_changed(of_state + of_model, parameters, "the first step of the optimizer")

    def _refuse_rebuilt(
        self, optimizer: Any, ours: Iterable[Any], parameters: Mapping[str, Any], held: set[int]
    ) -> None:
        """Refuse an optimizer without state, if one of its class has loaded state of the same parameters."""
        if not any(one.name.startswith(_STATE) for one in self._loaded):
            return
        for one in ours:
            theirs = [n for n, parameter in parameters.items() if id(parameter) in held and one.state.get(parameter)]
            if theirs and type(one) is type(optimizer) and not any(optimizer.state.get(parameters[n]) for n in theirs):
                raise LoadDiffers(
                    f"The {type(optimizer).__name__} that makes the first step is not the one that resume() filled "
                    f"from step {self._step}: it has no state of {_few(theirs)} (rank {self._rank}).",
                    hint=_HINT,
                )

    def _check_save(self, state: TrainState) -> None:
        model, optimizers = self._model(), _optimizers_of(state)
        if not any(one.name.startswith(_STATE) for one in self._loaded) or not optimizers:
            return  # training by anything else cannot be told from a change
        if model is not None and not _is_part(model, state.model) and not _is_part(state.model, model):
            save_logger(_log, step=self._step, rank=self._rank).warning(
                "the model of this save is not the one that resume() loaded step %d into (rank %d). %s",
                self._step,
                self._rank,
                _HINT,
            )
            return
        if not any(one.state for one in optimizers):
            raise LoadDiffers(
                f"The optimizer of this save has no state, and resume() loaded that of step {self._step} (rank "
                f"{self._rank}): it was built after the resume.",
                hint=_HINT,
            )
        parameters = _first_names(state)
        names = self._changed(self._tensors(parameters, optimizers))
        if any(name.startswith(_STATE) for name in names) or _swaps(optimizers):
            return
        there = [name for name in names if name.removeprefix("model.") in parameters]
        self._refuse_changed(there, parameters, "the first save, while the optimizer made no step")

    def _changed(self, tensors: Iterable[tuple[str, Any]], *, without_state: bool = False) -> tuple[str, ...]:
        from ckptmirror.formats.live_sums import fingerprints_of

        loaded = [one for one in self._loaded if not (without_state and one.name.startswith(_STATE))]
        names = {one.name for one in loaded}
        now = fingerprints_of(((name, tensor) for name, tensor in tensors if name in names), workers=cores())
        return changed(loaded, now) if now else ()

    def _tensors(self, parameters: Mapping[str, Any], optimizers: Iterable[Any]) -> Iterable[tuple[str, Any]]:
        """Yield parameters and their state under the names that a save gives them."""
        from ckptmirror.formats.capture import walk_tensors

        yield from ((f"model.{name}", one) for name, one in parameters.items())
        names = {id(one): name for name, one in parameters.items()}
        for optimizer in optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if (name := names.get(id(parameter))) is not None and parameter in optimizer.state:
                    yield from walk_tensors({"optimizer": {"state": {name: dict(optimizer.state[parameter])}}})

    def _refuse_changed(self, names: list[str], parameters: Mapping[str, Any], until: str) -> None:
        if not names:
            return
        text = (
            f"{_few(names)} changed (rank {self._rank}) between resume(), which loaded step {self._step}, and {until}"
        )
        of_model = [name.removeprefix("model.") for name in names if not name.startswith(_STATE)]
        if len(of_model) == len(names) and not any(self._is_other(name, parameters[name]) for name in of_model):
            save_logger(_log, step=self._step, rank=self._rank).warning(
                "%s. The values are close to those that were loaded. %s", text, _HINT
            )
            return
        raise LoadDiffers(f"{text}.", hint=_HINT)

    def _is_other(self, name: str, parameter: Any) -> bool:
        """Whether training would not have changed a parameter like this."""
        before, now = self._samples.get(name), _sample(parameter)
        if not parameter.requires_grad or before is None or before.shape != now.shape:
            return False
        return not float((now.cpu() - before.cpu()).norm()) <= _SMALL_CHANGE * float(before.cpu().norm())


def unchanged_check(state: TrainState, loaded: list[Summed], step: int, ranks: Ranks) -> UnchangedCheck | None:
    """Return the check that waits for the first step; None if nothing was proved, or it cannot be done."""
    try:
        return UnchangedCheck(state, loaded, step, ranks) if loaded else None
    except Exception as error:  # noqa: BLE001 - the user's objects may do anything; a start must not fail by this
        _log.debug("what was loaded will not be compared with what training begins with: %s", error)
        return None


def _optimizers_of(state: TrainState) -> list[Any]:
    from ckptmirror.formats.optimizer_state import optimizers_of

    return [one for one in optimizers_of(state.optimizer) if hasattr(one, "state")]


def _first_names(state: TrainState) -> dict[str, Any]:
    """Return each parameter of the model under the first of its names."""
    from ckptmirror.formats.names import live_parameters

    names: dict[int, str] = {}
    found = {}
    for name, parameter in live_parameters(state.model):
        if names.setdefault(id(parameter), name) == name:
            found[name] = parameter
    return found


def _memory_in_saves(state: TrainState) -> dict[str, int]:
    """Return where each tensor is that a save has under a name: code of the user may give a save another tensor."""
    from ckptmirror.formats.capture import walk_tensors
    from ckptmirror.formats.names import live_values
    from ckptmirror.formats.optimizer_state import capture_optimizer

    is_patched = "state_dict" in vars(state.model)  # it may gather, and then gives copies
    parts: dict[str, Any] = {"model": dict(live_values(state.model)) if not is_patched else {}}
    if state.optimizer is not None:
        parts["optimizer"] = {"state": capture_optimizer(state.model, state.optimizer)["state"]}
    return {name: _place(tensor) for name, tensor in walk_tensors(parts)}


def _is_at(tensor: Any, place: int | None) -> bool:
    return place is not None and _place(tensor) == place


def _place(tensor: Any) -> int:
    from ckptmirror.formats.shards import local_of
    from ckptmirror.formats.tensor_bytes import has_plain_bytes

    local = local_of(tensor)
    return int(local.data_ptr()) if has_plain_bytes(local) else -1


def _sample(parameter: Any) -> Any:
    """Return a few values of this rank's part of a parameter, from all over it."""
    from ckptmirror.formats.shards import local_of

    values = local_of(parameter).detach().reshape(-1)
    values = values[:: max(1, len(values) // _SAMPLE)][:_SAMPLE]
    return (values if values.is_complex() else values.float()).clone()


def _is_part(model: Any, whole: Any) -> bool:
    return any(one is model for one in whole.modules())


def _swaps(optimizers: Iterable[Any]) -> bool:
    return any(callable(getattr(one, "train", None)) for one in optimizers)


def _few(names: Iterable[str]) -> str:
    from ckptmirror.formats.names import some

    return some(names)
