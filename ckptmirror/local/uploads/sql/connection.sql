-- How a connection is set up, and how a change begins and ends. Statements may not need more than one parameter set each.

-- name: name the application
PRAGMA application_id = 1667985524;

-- name: read the application
PRAGMA application_id;

-- name: read the schema version
PRAGMA user_version;

-- name: build in a rollback journal
PRAGMA journal_mode = DELETE;

-- name: use a write-ahead log
PRAGMA journal_mode = WAL;

-- name: make every commit durable
PRAGMA synchronous = FULL;

-- name: make every commit of the build durable
PRAGMA synchronous = EXTRA;

-- name: keep the log small
PRAGMA journal_size_limit = 4194304;

-- name: move the log into the table soon
PRAGMA wal_autocheckpoint = 100;

-- name: move the log into the table at once
PRAGMA wal_autocheckpoint = 8;

-- name: keep scratch tables in memory
PRAGMA temp_store = MEMORY;

-- name: trust no function that the schema names
PRAGMA trusted_schema = OFF;

-- name: look over the pages
PRAGMA quick_check(1);

-- name: read the schema
SELECT name, CAST(sql AS BLOB) FROM sqlite_schema ORDER BY name;

-- name: look over pages and indexes
PRAGMA integrity_check(10);

-- name: begin a change
BEGIN IMMEDIATE;

-- name: commit the change
COMMIT;

-- name: undo the change
ROLLBACK;

-- name: move the log into the table
PRAGMA wal_checkpoint(RESTART);
