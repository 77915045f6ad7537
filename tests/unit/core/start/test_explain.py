"""The sentences of a start, as a person reads them."""

from __future__ import annotations

import pytest

from ckptmirror.core.errors import NotAuthorised
from ckptmirror.core.reach import Reach
from ckptmirror.core.start.explain import missing_word, not_answering, not_readable
from tests.unit.core.start.builders import silent


@pytest.mark.parametrize("why", ["Input/output error", "The meta is of format 9, which this version cannot read."])
def test_what_cannot_be_read_is_a_sentence_with_one_full_stop(why: str) -> None:
    text = str(not_readable("The copy of step 3", why))
    assert f"{why.removesuffix('.')}. It may be whole" in text
    assert ".." not in text


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("file:///nfs/run", "Make the directory accessible to this user; then try again."),
        ("gs://bucket/run", NotAuthorised.hint),
    ],
)
def test_the_advice_about_a_mirror_that_refuses_follows_from_its_kind(url: str, hint: str) -> None:
    refused = missing_word(silent(url, "Permission denied", reach=Reach.REFUSED))
    error = not_answering("A start over needs the answer of every mirror. ", {url: refused})
    assert isinstance(error, NotAuthorised)
    assert error.hint == hint
