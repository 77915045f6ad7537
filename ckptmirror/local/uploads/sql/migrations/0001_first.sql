-- The first schema. docs/design/uploads-table.md explains it; a change of it is a new numbered file, never an edit here.
-- row_crc is the CRC-32 of the row's canonical content (seals.py). Times are milliseconds of CLOCK_BOOTTIME beside the boot
-- id that they belong to; changed_at_utc is for people, and nothing is ordered by it.

CREATE TABLE facts (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    row_crc INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE saves (
    save_order INTEGER PRIMARY KEY AUTOINCREMENT,
    save_id TEXT NOT NULL UNIQUE,
    step INTEGER NOT NULL,
    kinds TEXT NOT NULL,
    meta_path TEXT NOT NULL,
    artifact_count INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    released INTEGER NOT NULL,
    row_crc INTEGER NOT NULL
);

CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    save_order INTEGER NOT NULL,
    save_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    path TEXT NOT NULL,
    mirror TEXT NOT NULL,
    role TEXT NOT NULL CHECK (role IN ('artifact', 'meta')),
    kinds TEXT NOT NULL,
    rank INTEGER,
    size_bytes INTEGER,
    crc32c INTEGER,
    state TEXT NOT NULL CHECK (state IN ('pending', 'uploading', 'verified', 'failed', 'skipped', 'removed')),
    object TEXT NOT NULL,
    generation INTEGER,
    session TEXT,
    attempts_made INTEGER NOT NULL,
    token INTEGER NOT NULL,
    claimed_by TEXT,
    lease_boot TEXT,
    lease_until_ms INTEGER,
    lease_ms INTEGER,
    not_before_boot TEXT,
    not_before_ms INTEGER,
    reason TEXT NOT NULL,
    changed_at_utc TEXT NOT NULL,
    row_crc INTEGER NOT NULL,
    UNIQUE (save_id, path, mirror)
);

-- The next record to send, oldest save first, artifacts before the meta ('artifact' < 'meta').
CREATE INDEX records_to_send ON records (mirror, state, save_order, role, id);

-- Whether anything of one save on one mirror is still to be sent.
CREATE INDEX records_of_a_save ON records (save_id, mirror, role, state);

-- Counts and bytes, answered from the index alone.
CREATE INDEX records_counted ON records (mirror, state, size_bytes);

CREATE TABLE transitions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    save_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    path TEXT NOT NULL,
    mirror TEXT NOT NULL,
    old_state TEXT,
    new_state TEXT,
    token INTEGER NOT NULL,
    worker TEXT,
    reason TEXT NOT NULL,
    at_utc TEXT NOT NULL
);

CREATE INDEX transitions_of_a_save ON transitions (save_id, id);

-- Triggers write the history, so no state changes without a trace, not even by hand.
CREATE TRIGGER a_record_was_added AFTER INSERT ON records
BEGIN
    INSERT INTO transitions (save_id, step, path, mirror, old_state, new_state, token, worker, reason, at_utc)
    VALUES (NEW.save_id, NEW.step, NEW.path, NEW.mirror, NULL, NEW.state, NEW.token, NULL, NEW.reason, NEW.changed_at_utc);
END;

CREATE TRIGGER a_record_changed_its_state AFTER UPDATE OF state ON records WHEN OLD.state <> NEW.state
BEGIN
    INSERT INTO transitions (save_id, step, path, mirror, old_state, new_state, token, worker, reason, at_utc)
    VALUES (NEW.save_id, NEW.step, NEW.path, NEW.mirror, OLD.state, NEW.state, NEW.token,
            coalesce(NEW.claimed_by, OLD.claimed_by), NEW.reason, NEW.changed_at_utc);
END;
