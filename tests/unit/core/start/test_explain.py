"""The sentences of a start, as a person reads them."""

from __future__ import annotations

import pytest

from ckptmirror.core.start.explain import not_readable


@pytest.mark.parametrize("why", ["Input/output error", "The meta is of format 9, which this version cannot read."])
def test_what_cannot_be_read_is_a_sentence_with_one_full_stop(why: str) -> None:
    text = str(not_readable("The copy of step 3", why))
    assert f"{why.removesuffix('.')}. It may be whole" in text
    assert ".." not in text
