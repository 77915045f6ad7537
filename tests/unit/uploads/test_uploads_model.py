"""Whatever the order of verbs, the table agrees with a model that fits on a page."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from uploads_fakes import GS, NFS, artifacts_of

from ckptmirror.core.errors import ClaimLost, IllegalTransition
from ckptmirror.core.lifecycle import RecordState
from ckptmirror.local.uploads import Claim, UploadsTable
from tests.kit.clock import HandClock
from tests.kit.saves import save_id_of

MIRRORS = (GS, NFS)
Key = tuple[str, str, str]  # save id, path, mirror


@dataclass
class Row:
    """What the model keeps of a record."""

    order: tuple[int, str, int]
    role: str
    state: RecordState = RecordState.PENDING
    holder: int = 0
    lease_until_ms: int = 0
    not_before_ms: int = 0


@dataclass
class Model:
    """The rules once more, by the shortest code that can be read."""

    rows: dict[Key, Row] = field(default_factory=dict)
    released: set[str] = field(default_factory=set)
    claims: int = 0

    def claimable(self, mirror: str, now_ms: int) -> Key | None:
        def ready(key: Key, row: Row) -> bool:
            waits = row.state is RecordState.PENDING and row.not_before_ms <= now_ms
            late = row.state is RecordState.UPLOADING and row.lease_until_ms <= now_ms
            siblings = [o for k, o in self.rows.items() if k[0] == key[0] and k[2] == mirror and o.role == "artifact"]
            free = row.role == "artifact" or all(
                o.state in (RecordState.VERIFIED, RecordState.SKIPPED) for o in siblings
            )
            return key[2] == mirror and key[0] in self.released and (waits or late) and free

        found = [(row.order, key) for key, row in self.rows.items() if ready(key, row)]
        return min(found)[1] if found else None


class TableAgainstModel(RuleBasedStateMachine):
    """Runs the same verbs on both."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = HandClock()
        self.path = Path(self.folder.name) / "uploads.db"
        self.table = UploadsTable.open(self.path, create=True, clock=self.clock)
        self.model = Model()
        self.held: list[tuple[Key, int, Claim]] = []  # every claim ever given, live or stale
        self.added = 0

    def teardown(self) -> None:
        self.table.close()
        self.folder.cleanup()

    @rule(count=st.integers(0, 3), both=st.booleans(), release=st.booleans())
    def add(self, count: int, both: bool, release: bool) -> None:
        self.added += 1
        save_id, step = save_id_of(self.added), self.added * 10
        mirrors = MIRRORS if both else MIRRORS[:1]
        self.table.add_save(save_id, step, ("dcp",), artifacts_of(step, count), mirrors)
        for mirror in mirrors:
            for number, artifact in enumerate(artifacts_of(step, count)):
                self.model.rows[save_id, artifact.path, mirror] = Row((self.added, "artifact", number), "artifact")
            self.model.rows[save_id, f"meta_{step:06d}.json", mirror] = Row((self.added, "meta", 0), "meta")
        if release:
            self.release(self.added)

    @precondition(lambda self: self.added)
    @rule(number=st.integers(1, 8))
    def release(self, number: int) -> None:
        save_id = save_id_of(number)
        if any(key[0] == save_id for key in self.model.rows):
            self.table.release_save(save_id)
            self.model.released.add(save_id)

    @rule(number=st.integers(1, 8))
    def forget(self, number: int) -> None:
        save_id = save_id_of(number)
        self.table.forget_save(save_id)
        self.model.rows = {key: row for key, row in self.model.rows.items() if key[0] != save_id}
        self.model.released.discard(save_id)

    @rule(mirror=st.sampled_from(MIRRORS), lease_s=st.integers(1, 100))
    def claim(self, mirror: str, lease_s: int) -> None:
        now_ms = self.clock.now_ms()
        for key, row in self.model.rows.items():
            if key[2] == mirror and row.state is RecordState.UPLOADING and row.lease_until_ms <= now_ms:
                row.state, row.not_before_ms = RecordState.PENDING, 0
        expected = self.model.claimable(mirror, now_ms)
        claim = self.table.claim("worker", mirror, lease_s=lease_s)
        if expected is None:
            assert claim is None
            return
        assert claim is not None
        record = claim.record
        assert (record.save_id, record.path, record.mirror) == expected
        self.model.claims += 1
        row = self.model.rows[expected]
        row.state, row.holder, row.lease_until_ms = RecordState.UPLOADING, self.model.claims, now_ms + lease_s * 1000
        self.held.append((expected, self.model.claims, claim))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), verb=st.sampled_from(["verify", "put_back", "fail", "renew"]), wait_s=st.integers(0, 60))
    def settle(self, data: st.DataObject, verb: str, wait_s: int) -> None:
        key, number, claim = data.draw(st.sampled_from(self.held[-6:]))
        row = self.model.rows.get(key)
        record = claim.record
        verbs: dict[str, Any] = {
            "verify": lambda: self.table.verify(
                claim,
                object_name=record.object,
                generation=1,
                size_bytes=record.size_bytes or 7,
                crc32c=record.crc32c or 7,
            ),
            "put_back": lambda: self.table.put_back(claim, "busy", not_before_s=wait_s),
            "fail": lambda: self.table.fail(claim, "refused"),
            "renew": lambda: self.table.renew(claim, wait_s),
        }
        if row is None or row.state is not RecordState.UPLOADING or row.holder != number:
            with pytest.raises(ClaimLost):
                verbs[verb]()
            return
        verbs[verb]()
        if verb == "renew":
            row.lease_until_ms = self.clock.now_ms() + wait_s * 1000
        else:
            states = {"verify": RecordState.VERIFIED, "put_back": RecordState.PENDING, "fail": RecordState.FAILED}
            row.state = states[verb]
            row.not_before_ms = self.clock.now_ms() + wait_s * 1000 if verb == "put_back" else 0

    @rule(number=st.integers(1, 8), mirror=st.sampled_from(MIRRORS))
    def skip(self, number: int, mirror: str) -> None:
        unsent = (RecordState.PENDING, RecordState.UPLOADING, RecordState.FAILED)
        wanted = [
            row
            for k, row in self.model.rows.items()
            if k[0] == save_id_of(number) and k[2] == mirror and row.state in unsent
        ]
        assert self.table.skip(save_id_of(number), "policy", mirror=mirror) == len(wanted)
        for row in wanted:
            row.state = RecordState.SKIPPED

    @rule(numbers=st.sets(st.integers(1, 8)), why=st.sampled_from(["policy", "another"]))
    def take_back(self, numbers: set[int], why: str) -> None:
        ids = {save_id_of(number) for number in numbers} if why == "policy" else set()
        rows = [row for k, row in self.model.rows.items() if k[0] in ids and row.state is RecordState.SKIPPED]
        assert self.table.take_back({save_id_of(number) for number in numbers}, why.__eq__) == len(rows)
        for row in rows:
            row.state, row.not_before_ms = RecordState.PENDING, 0

    @rule(number=st.integers(1, 8), mirror=st.sampled_from(MIRRORS))
    def remove(self, number: int, mirror: str) -> None:
        wanted = [
            row
            for k, row in self.model.rows.items()
            if k[0] == save_id_of(number) and k[2] == mirror and row.state is not RecordState.REMOVED
        ]
        assert self.table.remove(save_id_of(number), mirror, "tombstone") == len(wanted)
        for row in wanted:
            row.state = RecordState.REMOVED

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def unverify(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.rows)))
        row = self.model.rows[key]
        if row.state is RecordState.VERIFIED:
            self.table.unverify(*key, reason="gone")
            row.state, row.not_before_ms = RecordState.PENDING, 0
        else:
            with pytest.raises(IllegalTransition):
                self.table.unverify(*key, reason="gone")

    @rule()
    def retry(self) -> None:
        wanted = [row for row in self.model.rows.values() if row.state is RecordState.FAILED]
        assert self.table.retry_failed() == len(wanted)
        for row in wanted:
            row.state, row.not_before_ms = RecordState.PENDING, 0

    @rule(seconds=st.integers(1, 80))
    def pass_time(self, seconds: int) -> None:
        self.clock.pass_s(seconds)

    @rule()
    def open_again(self) -> None:
        self.table.close()
        self.table = UploadsTable.open(self.path, clock=self.clock)

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        records = {(r.save_id, r.path, r.mirror): r for r in self.table.records()}
        assert {key: r.state for key, r in records.items()} == {key: row.state for key, row in self.model.rows.items()}
        assert {r.save_id for r in records.values() if r.released} == {
            key[0] for key in self.model.rows if key[0] in self.model.released
        }
        held = {key for key, r in records.items() if r.claimed_by is not None}
        assert held == {key for key, row in self.model.rows.items() if row.state is RecordState.UPLOADING}

    @invariant()
    def the_history_ends_where_the_records_are(self) -> None:
        last = {(t.save_id, t.path, t.mirror): t.new for t in self.table.history()}
        assert {key: new for key, new in last.items() if new is not None} == {
            key: row.state for key, row in self.model.rows.items()
        }


TableAgainstModel.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_table_agrees_with_the_model = TableAgainstModel.TestCase
