"""Values of which a save keeps what they are, and which only a live one can take: members of enums, and generators.

Rules:
* A load finds no class by the name that is in a file. It takes the class of the live value at the same place, and
  compares the names.
* A generator is set in place, so whatever else holds it sees the state. A member takes the place of the live one.
* They may be anywhere in the dicts, lists and tuples of the user's extra. Elsewhere they are refused when saved.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ckptmirror.core.errors import UsageError
from ckptmirror.formats.generators import kind_of_generator, set_generator, state_of_generator

__all__ = ["SavedGenerator", "SavedMember", "is_live_only", "put_into", "saved_as"]


@dataclass(frozen=True)
class SavedMember:
    """A member of an enum.

    Attributes:
        enum: The name of the class, as it is called in its module.
        name: The name of the member; "" if it is a combination of flags.
        value: The number of a combination of flags.
    """

    enum: str
    name: str = ""
    value: int = 0

    def __str__(self) -> str:
        return f"{self.enum}.{self.name}" if self.name else f"{self.enum}({self.value})"


@dataclass(frozen=True)
class SavedGenerator:
    """The state of a random number generator.

    Attributes:
        kind: Its kind (``formats.generators``).
        state: Its state.
    """

    kind: str
    state: dict[str, Any]

    def __str__(self) -> str:
        return f"a random number generator of kind {self.kind}"


def saved_as(value: Any) -> SavedMember | SavedGenerator | None:
    """Return what is saved of a live value; None if it is of another kind."""
    if isinstance(value, enum.Flag):
        return SavedMember(type(value).__qualname__, value=value.value)
    if isinstance(value, enum.Enum):
        return SavedMember(type(value).__qualname__, name=value.name)
    kind = kind_of_generator(value)
    return None if kind is None else SavedGenerator(kind, state_of_generator(value))


def is_live_only(saved: Any) -> bool:
    """Whether a saved value needs a live one."""
    return isinstance(saved, (SavedMember, SavedGenerator))


def put_into(now: Any, saved: SavedMember | SavedGenerator, where: str) -> Any:
    """Return the live value that ``saved`` stands for: a member of the class of ``now``, or ``now`` itself, set.

    Raises:
        UsageError: ``now`` is of another kind.
        IntegrityError: The state of a generator is broken.
    """
    if isinstance(saved, SavedGenerator):
        if kind_of_generator(now) != saved.kind:
            raise UsageError(
                f"{where} was saved as {saved}, and here it is {_described(now)}.",
                hint="Create such a generator there before resume(): its state is then set.",
            )
        set_generator(now, saved.state)
        return now
    if not isinstance(now, enum.Enum) or type(now).__qualname__ != saved.enum:
        raise UsageError(
            f"{where} was saved as {saved}, and here it is {_described(now)}.",
            hint=f"Put a member of {saved.enum} there before resume(), or save its name.",
        )
    if isinstance(now, enum.Flag) is bool(saved.name):
        raise UsageError(f"{where} was saved as {saved}; {saved.enum} is an enum of another kind here.")
    try:
        return type(now)[saved.name] if saved.name else type(now)(saved.value)
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{where} was saved as {saved}; {saved.enum} has no such member here.", hint="Keep the member in the class."
        ) from error


def _described(now: Any) -> str:
    kind = kind_of_generator(now)
    if kind is not None:
        return f"one of kind {kind}"
    return f"{type(now).__qualname__}.{now.name}" if isinstance(now, enum.Enum) else f"a {type(now).__qualname__}"
