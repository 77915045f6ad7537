-- Single facts about the table: its root and run ('identity'), its mirrors ('mirrors'), and the identity
-- that each mirror had at the first contact ('mirror <url>'). Each is one sealed JSON value.

-- name: read a fact
SELECT CAST(name AS BLOB), CAST(value AS BLOB), row_crc FROM facts WHERE name = :name;

-- name: write a fact
INSERT INTO facts (name, value, row_crc) VALUES (:name, :value, :row_crc)
ON CONFLICT (name) DO UPDATE SET value = excluded.value, row_crc = excluded.row_crc;

-- name: write a fact unless it is there
INSERT INTO facts (name, value, row_crc) VALUES (:name, :value, :row_crc)
ON CONFLICT (name) DO NOTHING;
