-- Every change of state, written by triggers; for people and for the status page. No deletion is based on it.

-- columns: transition
id, CAST(save_id AS BLOB), step, CAST(path AS BLOB), CAST(mirror AS BLOB), CAST(old_state AS BLOB),
CAST(new_state AS BLOB), token, CAST(worker AS BLOB), CAST(reason AS BLOB), CAST(at_utc AS BLOB)

-- name: read the whole history
SELECT {transition} FROM transitions ORDER BY id;

-- name: read the history of a save
SELECT {transition} FROM transitions WHERE save_id = :save_id ORDER BY id;

-- name: note that the records of a save go
INSERT INTO transitions (save_id, step, path, mirror, old_state, new_state, token, worker, reason, at_utc)
SELECT save_id, step, path, mirror, state, NULL, token, claimed_by, :reason, :at_utc
FROM records WHERE save_id = :save_id ORDER BY id;

-- name: note that a broken record goes
INSERT INTO transitions (save_id, step, path, mirror, old_state, new_state, token, worker, reason, at_utc)
SELECT save_id, step, path, mirror, state, NULL, token, claimed_by, :reason, :at_utc
FROM records WHERE id = :id;

-- name: forget the oldest history
DELETE FROM transitions WHERE id <= (SELECT max(id) FROM transitions) - :keep;

-- name: forget the oldest tries
DELETE FROM transitions WHERE id IN (
    SELECT id FROM transitions
    WHERE new_state = 'uploading' OR (old_state = 'uploading' AND new_state = 'pending')
    ORDER BY id LIMIT 100
);
