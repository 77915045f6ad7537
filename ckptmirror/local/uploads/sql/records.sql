-- Upload records: one row per save, path and mirror. Every write states the state and token that it expects to find.

-- columns: record
r.id, r.save_order, CAST(r.save_id AS BLOB), r.step, CAST(r.path AS BLOB), CAST(r.mirror AS BLOB), CAST(r.role AS BLOB),
CAST(r.kinds AS BLOB), r.rank, r.size_bytes, r.crc32c, CAST(r.state AS BLOB), CAST(r.object AS BLOB), r.generation,
CAST(r.session AS BLOB), r.attempts_made, r.token, CAST(r.claimed_by AS BLOB), CAST(r.lease_boot AS BLOB),
r.lease_until_ms, r.lease_ms, CAST(r.not_before_boot AS BLOB), r.not_before_ms, CAST(r.reason AS BLOB),
CAST(r.changed_at_utc AS BLOB), r.row_crc,
(SELECT s.released FROM saves s WHERE s.save_id = r.save_id)

-- name: add a record
INSERT INTO records (
    save_order, save_id, step, path, mirror, role, kinds, rank, size_bytes, crc32c, state, object, generation, session,
    attempts_made, token, claimed_by, lease_boot, lease_until_ms, lease_ms, not_before_boot, not_before_ms, reason,
    changed_at_utc, row_crc
) VALUES (
    :save_order, :save_id, :step, :path, :mirror, :role, :kinds, :rank, :size_bytes, :crc32c, :state, :object, :generation,
    :session, :attempts_made, :token, :claimed_by, :lease_boot, :lease_until_ms, :lease_ms, :not_before_boot,
    :not_before_ms, :reason, :changed_at_utc, :row_crc
) ON CONFLICT (save_id, path, mirror) DO NOTHING;

-- name: write a changed record
UPDATE records SET
    size_bytes = :size_bytes, crc32c = :crc32c, state = :state, object = :object, generation = :generation,
    session = :session, attempts_made = :attempts_made, token = :token, claimed_by = :claimed_by,
    lease_boot = :lease_boot, lease_until_ms = :lease_until_ms, lease_ms = :lease_ms,
    not_before_boot = :not_before_boot, not_before_ms = :not_before_ms, reason = :reason,
    changed_at_utc = :changed_at_utc, row_crc = :row_crc
WHERE id = :id AND save_id = :save_id AND state = :expected_state AND token = :expected_token;

-- name: read a record
SELECT {record} FROM records r WHERE r.save_id = :save_id AND r.path = :path AND r.mirror = :mirror;

-- name: read all records
SELECT {record} FROM records r ORDER BY r.save_order, r.mirror, r.role, r.id;

-- name: read the records of a save
SELECT {record} FROM records r WHERE r.save_id = :save_id ORDER BY r.mirror, r.role, r.id;

-- name: read all records in a state
SELECT {record} FROM records r WHERE r.state = :state ORDER BY r.save_order, r.mirror, r.role, r.id;

-- name: read the records of a mirror in a state
SELECT {record} FROM records r WHERE r.mirror = :mirror AND r.state = :state ORDER BY r.save_order, r.role, r.id;

-- name: read the records of a save on a mirror
SELECT {record} FROM records r WHERE r.save_id = :save_id AND r.mirror = :mirror ORDER BY r.role, r.id;

-- name: count the records of a save
SELECT count(*) FROM records WHERE save_id = :save_id;

-- name: delete the records of a save
DELETE FROM records WHERE save_id = :save_id;

-- name: delete a broken record
DELETE FROM records WHERE id = :id;
