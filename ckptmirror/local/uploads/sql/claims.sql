-- The records that a worker may claim. A lease or a waiting time of another boot is over. So is one that ends later than
-- its granted length allows: it was measured with another clock.

-- name: find the records that may be sent, oldest first
SELECT {record}
FROM records r JOIN saves s ON s.save_id = r.save_id
WHERE r.mirror = :mirror
  AND r.state = 'pending'
  AND s.released = 1
  AND (r.not_before_ms IS NULL OR r.not_before_boot IS NOT :boot OR r.not_before_ms <= :now_ms
       OR r.not_before_ms > :now_ms + :longest_wait_ms)
  AND r.save_id NOT IN (SELECT value FROM json_each(:excluded))
  AND (r.role = 'artifact' OR NOT EXISTS (
        SELECT 1 FROM records o
        WHERE o.save_id = r.save_id AND o.mirror = r.mirror AND o.role = 'artifact'
          AND o.state IN ('pending', 'uploading', 'failed', 'removed')))
ORDER BY r.save_order, r.role, r.id;

-- name: find the records whose lease ran out
SELECT {record}
FROM records r
WHERE r.mirror = :mirror
  AND r.state = 'uploading'
  AND (r.lease_until_ms IS NULL OR r.lease_boot IS NOT :boot OR r.lease_until_ms <= :now_ms
       OR r.lease_until_ms > :now_ms + r.lease_ms)
ORDER BY r.save_order, r.role, r.id;
