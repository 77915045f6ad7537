-- Counts for people, from the index alone. They are not checked row by row: nothing is deleted on their word.

-- name: count records and bytes by mirror and state
SELECT CAST(mirror AS BLOB), CAST(state AS BLOB), count(*), total(size_bytes)
FROM records GROUP BY mirror, state ORDER BY mirror, state;

-- name: find the oldest save that a mirror still waits for
SELECT save_order, CAST(save_id AS BLOB), step, CAST(changed_at_utc AS BLOB)
FROM records WHERE mirror = :mirror AND state = :state ORDER BY save_order, role, id LIMIT 1;
