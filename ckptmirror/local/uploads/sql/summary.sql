-- Counts for people, from the index alone. The rows are not checked, so no deletion is based on them.

-- name: count records and bytes by mirror and state
SELECT CAST(mirror AS BLOB), CAST(state AS BLOB), count(*), total(size_bytes)
FROM records GROUP BY mirror, state ORDER BY mirror, state;
