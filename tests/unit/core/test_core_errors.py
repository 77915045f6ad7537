"""Errors: every class says what the command exits with and what to do next, and survives the way between ranks."""

from __future__ import annotations

import inspect
import pickle
import traceback

import pytest

from ckptmirror.core import errors
from ckptmirror.core.errors import CkptMirrorError, StoreTemporary

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, CkptMirrorError)]
EXIT_CODES = {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12}  # those of the public table, without 0 and the interrupted ones


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_an_exit_code_a_hint_and_a_message(cls: type[CkptMirrorError]) -> None:
    assert cls.exit_code in EXIT_CODES
    assert cls.hint.strip().endswith(".") or cls.hint.strip().endswith("`.")
    assert cls.__doc__
    assert "__doc__" in vars(cls)
    first = cls.__doc__.strip().splitlines()[0]
    assert first.endswith(".")
    assert str(cls()) == first
    assert isinstance(cls.temporary, bool)
    assert cls.__name__ in errors.__all__


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_pickling(cls: type[CkptMirrorError]) -> None:
    for error in (cls(), cls("It broke."), cls("It broke.", hint="Mend it.")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is cls
        assert (str(again), again.message, again.hint) == (str(error), error.message, error.hint)


def test_plain_attributes_survive_pickling_and_others_do_not_break_it() -> None:
    error = StoreTemporary("Busy.")
    error.retry_after_s = 7.5
    error.response = lambda: None  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(error))
    assert again.retry_after_s == 7.5
    assert not hasattr(again, "response")


def test_every_public_exit_code_has_a_class() -> None:
    assert {cls.exit_code for cls in CLASSES} == EXIT_CODES


def test_temporary_errors_exit_with_5_or_say_that_the_table_is_locked() -> None:
    assert {cls.exit_code for cls in CLASSES if cls.temporary} == {5, 11}


def test_the_hint_stands_below_the_message_in_a_traceback() -> None:
    error = errors.UsageError("no such step", hint="Run `ckptmirror ls`.")
    shown = "".join(traceback.format_exception(pickle.loads(pickle.dumps(error))))
    assert shown.endswith("no such step\nRun `ckptmirror ls`.\n")


def test_a_hint_that_is_set_later_takes_the_place_of_the_first_in_a_traceback() -> None:
    error = errors.UsageError("no such step")
    error.add_note("while staging")
    error.hint = "Run `ckptmirror ls --root /run`."
    for one, notes in ((error, ["while staging"]), (pickle.loads(pickle.dumps(error)), [])):
        assert "".join(traceback.format_exception(one)).endswith("\n".join(["no such step", error.hint, *notes]) + "\n")
