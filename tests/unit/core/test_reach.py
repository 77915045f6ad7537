"""Which errors say that a place is silent, and which that it refuses; every class of errors is in the table."""

from __future__ import annotations

import pytest

from ckptmirror.core import errors
from ckptmirror.core.reach import Reach, access_hint, reach_after

SILENT = {
    "LocalStorageFull",
    "StoreHangs",
    "StoreTemporary",
    "TableLocked",
    "Temporary",
    "WaitTimeout",
}
REFUSED = {"NotAuthorised"}


@pytest.mark.parametrize("name", errors.__all__)
def test_each_class_of_errors_says_how_a_place_is_reached(name: str) -> None:
    expected = Reach.SILENT if name in SILENT else Reach.REFUSED if name in REFUSED else Reach.ANSWERED
    assert reach_after(getattr(errors, name)("why")) is expected


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("no number"), KeyboardInterrupt()])
def test_an_error_that_is_not_ours_is_no_silence(error: BaseException) -> None:
    assert reach_after(error) is Reach.ANSWERED


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (["gs://bucket/run"], "gcloud auth application-default login"),
        (["file:///nfs/run"], "Make the directory accessible to this user"),
        (["/nfs/run", "file:///nfs/other"], "Make the directory accessible to this user"),
        (["s3://bucket/run"], "Use credentials that are accepted there"),
        (["gs://bucket/run", "file:///nfs/run"], "Use credentials that are accepted there"),
    ],
)
def test_what_a_person_has_to_change_follows_from_the_place(places: list[str], says: str) -> None:
    assert says in access_hint(places)
    assert ("gcloud" in access_hint(places)) == all(place.startswith("gs://") for place in places)
