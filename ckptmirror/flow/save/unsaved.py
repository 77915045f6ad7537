"""Notices at a save what training has and no ``state_dict`` keeps, as far as that is cheap to see.

Rules:
* Each is said once per manager, by rank 0. Nothing is refused: it may be what can be computed again.
* A non-persistent buffer counts if its values differ from those at the first save, not if it was only written: DDP
  writes them at every forward pass. Large ones are not looked at. Values are compared only after a write.
* An optimizer that another holds counts if the outer ``state_dict()`` has no tensor of its state, nor extra the inner.
* Which modules have such buffers, or hooks, is looked up once per model: walking over all of them takes long.
* A hook of DDP counts if it has a state other than a process group.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

if TYPE_CHECKING:
    from ckptmirror.formats.train_state import TrainState

__all__ = ["UnsavedDetector"]

_NON_PERSISTENT = "_non_persistent_buffers_set"
_BUFFER_BYTES = 1 << 20
_ALL_BUFFERS_BYTES = 16 << 20
_log = logging.getLogger("ckptmirror.save")


class UnsavedDetector:
    """Looks at the state of each save."""

    def __init__(self) -> None:
        self._first: dict[str, Any] | None = None  # copies of the small non-persistent buffers, at the first save
        self._seen: dict[str, tuple[int, int]] = {}  # where each was when it was last compared, and its version
        self._said: set[str] = set()
        self._model: ReferenceType[Any] | None = None
        self._with_buffers: list[tuple[str, ReferenceType[Any]]] = []
        self._with_hooks: list[ReferenceType[Any]] = []

    def look_at(self, state: TrainState) -> None:
        """Warn of what this save does not keep; of each once."""
        try:
            self._look_at(state)
        except Exception as error:  # noqa: BLE001 - the user's objects may do anything; a save must not fail by this
            _log.debug("what the save does not keep could not be looked at: %s", error)

    def _look_at(self, state: TrainState) -> None:
        if self._model is None or self._model() is not state.model:
            self._model, self._first = ref(state.model), None
            named = list(state.model.named_modules())
            self._with_buffers = [(n, ref(one)) for n, one in named if getattr(one, _NON_PERSISTENT, None)]
            self._with_hooks = [ref(one) for _, one in named if hasattr(one, "_comm_hooks")]
        if changed := self._changed_buffers():
            self._say(
                "buffers",
                f"model.{', model.'.join(changed[:3])}{f' and {len(changed) - 3} more' if len(changed) > 3 else ''} "
                "changed since the first save, and no save keeps them: they are buffers with persistent=False. If "
                "they cannot be computed again: register_buffer(..., persistent=True), or TrainState(extra={...})",
            )
        for outer, name, inner in _hidden_optimizers(state):
            self._say(
                f"optimizer {outer}.{name}",
                f"the optimizer {outer} holds another, {name} ({inner}), whose state is not in its state_dict(): no "
                f'save keeps it. Pass it too: TrainState(extra={{"{name}": optimizer.{name}}})',
            )
        for hook, kind in _hooks_with_state(self._with_hooks):
            self._say(
                f"hook {hook}",
                f"the communication hook {hook} of DistributedDataParallel has a state ({kind}) that no save keeps: a "
                "resumed run starts without it, so its gradients differ for some steps",
            )

    def _say(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            _log.warning("%s", text)

    def _changed_buffers(self) -> list[str]:
        if "buffers" in self._said:
            return []
        now = dict(_small_buffers(self._with_buffers))
        if self._first is None:
            self._first = {name: buffer.detach().clone() for name, buffer in now.items()}
            self._seen = {name: _version(buffer) for name, buffer in now.items()}
            return []
        written = [name for name, buffer in now.items() if self._seen.get(name) != _version(buffer)]
        self._seen.update((name, _version(now[name])) for name in written)
        return [name for name in written if name in self._first and _differs(self._first[name], now[name])]


def _small_buffers(modules: Sequence[tuple[str, ReferenceType[Any]]]) -> Iterator[tuple[str, Any]]:
    left_bytes = _ALL_BUFFERS_BYTES
    for prefix, reference in modules:
        module = reference()
        for name in sorted(getattr(module, _NON_PERSISTENT, ())):
            buffer = getattr(module, "_buffers", {}).get(name)
            if buffer is None or buffer.is_meta or buffer.nbytes > min(_BUFFER_BYTES, left_bytes):
                continue
            left_bytes -= buffer.nbytes
            yield f"{prefix}.{name}" if prefix else name, buffer


def _version(buffer: Any) -> tuple[int, int]:
    return buffer.data_ptr(), -1 if buffer.is_inference() else buffer._version


def _differs(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return True
    return not bool(((one == other) | ((one != one) & (other != other))).all())


def _hidden_optimizers(state: TrainState) -> Iterator[tuple[str, str, str]]:
    """Yield class, attribute, and class of the optimizer in it, where the outer state has nothing of the inner one."""
    from ckptmirror.core.containers import leaves

    optimizer = state.optimizer
    passed = {id(leaf) for leaf in leaves(state.extra)}
    values = optimizer.values() if isinstance(optimizer, Mapping) else optimizer
    for outer in values if optimizer is not None and hasattr(values, "__iter__") else [optimizer]:
        inner = {name: one for name, one in getattr(outer, "__dict__", {}).items() if _is_optimizer(one, outer)}
        if not inner:
            continue
        kept = {id(value) for value in _values(outer.state_dict().get("state"))}
        for name, one in inner.items():
            held = [value for value in _values(one.state) if hasattr(value, "data_ptr")]
            if held and id(one) not in passed and not any(id(value) in kept for value in held):
                yield type(outer).__name__, name, type(one).__name__


def _is_optimizer(one: Any, outer: Any) -> bool:
    return one is not outer and hasattr(one, "param_groups") and isinstance(getattr(one, "state", None), Mapping)


def _values(state: Any) -> Iterator[Any]:
    for of_parameter in state.values() if isinstance(state, Mapping) else ():
        yield from of_parameter.values() if isinstance(of_parameter, Mapping) else ()


def _hooks_with_state(modules: Sequence[ReferenceType[Any]]) -> Iterator[tuple[str, str]]:
    for reference in modules:
        for hook, state in getattr(reference(), "_comm_hooks", ()):
            if state is not None and not type(state).__name__.startswith("ProcessGroup"):
                yield getattr(hook, "__name__", type(hook).__name__), type(state).__name__
