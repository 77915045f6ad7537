-- One row per save: the order in which saves are sent, and how many artifacts each must have on a mirror.
-- Text is read as bytes, so that one broken letter damages one row and not the whole answer.

-- columns: save
save_order, CAST(save_id AS BLOB), step, CAST(kinds AS BLOB), CAST(meta_path AS BLOB),
artifact_count, size_bytes, released, row_crc

-- name: add a save
INSERT INTO saves (save_id, step, kinds, meta_path, artifact_count, size_bytes, released, row_crc)
VALUES (:save_id, :step, :kinds, :meta_path, :artifact_count, :size_bytes, :released, :row_crc);

-- name: write a changed save
UPDATE saves SET released = :released, row_crc = :row_crc WHERE save_order = :save_order AND save_id = :save_id;

-- name: read a save
SELECT {save} FROM saves WHERE save_id = :save_id;

-- name: read all saves
SELECT {save} FROM saves ORDER BY save_order;

-- name: delete a save
DELETE FROM saves WHERE save_id = :save_id;

-- name: delete a broken save
DELETE FROM saves WHERE save_order = :save_order;
