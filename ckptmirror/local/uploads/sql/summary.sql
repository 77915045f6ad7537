-- Counts for people, from the index alone. They are not checked row by row: nothing is deleted on their word.

-- name: count records and bytes by mirror and state
SELECT CAST(mirror AS BLOB), CAST(state AS BLOB), count(*), total(size_bytes)
FROM records GROUP BY mirror, state ORDER BY mirror, state;
