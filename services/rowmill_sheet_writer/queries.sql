-- The sheet writer's statements. Arrays are index-aligned. Every transaction locks page records first, then sheet rows, then counts, each kind in
-- the order of its key, so that concurrent transactions never wait for each other in a circle.

-- name: find_sheet
SELECT sheet_id FROM sheets WHERE org = $1 AND play = $2 AND dataset = $3

-- name: add_sheet
-- Nothing where another writer was first.
INSERT INTO sheets (org, play, dataset) VALUES ($1, $2, $3) ON CONFLICT (org, play, dataset) DO NOTHING

-- name: read_rows
-- The stored rows of these (sheet, key)s.
SELECT r.sheet_id, r.row_key, r.run_number, r.attempt, r.status, r.shadows, r.input, r.values, r.meta
FROM unnest($1::bigint[], $2::bytea[]) AS wanted (sheet_id, row_key)
JOIN sheet_rows AS r ON r.sheet_id = wanted.sheet_id AND r.row_key = wanted.row_key

-- name: add_pages
-- Record pages that have no record yet; returns those (a page that another lookup records at this moment is waited for, and is not among them).
INSERT INTO pages (run_id, dataset, page, sheet_id, first_index, row_count, marks, row_keys, inputs)
SELECT * FROM unnest($1::text[], $2::text[], $3::int[], $4::bigint[], $5::bigint[], $6::int[], $7::text[], $8::bytea[], $9::json[])
ON CONFLICT (run_id, dataset, page) DO NOTHING
RETURNING run_id, dataset, page

-- name: lock_pages
-- Page records, locked in the order of their ids until the transaction ends.
SELECT p.run_id, p.dataset, p.page, p.sheet_id, p.first_index, p.marks, p.row_keys, p.ends, p.inputs
FROM unnest($1::text[], $2::text[], $3::int[]) AS wanted (run_id, dataset, page)
JOIN pages AS p ON p.run_id = wanted.run_id AND p.dataset = wanted.dataset AND p.page = wanted.page
ORDER BY p.run_id, p.dataset, p.page
FOR UPDATE OF p

-- name: lock_pages_to_reopen
-- The next $5 pages of a dataset, from number $3 on, whose marks fit the pattern $4, in order, locked until the transaction ends.
SELECT p.run_id, p.dataset, p.page, p.sheet_id, p.first_index, p.marks, p.row_keys, p.ends, p.inputs
FROM pages AS p WHERE p.run_id = $1 AND p.dataset = $2 AND p.page >= $3 AND p.marks ~ $4
ORDER BY p.page LIMIT $5
FOR UPDATE

-- name: save_pages
-- Marks and ends of page records that this transaction has locked.
UPDATE pages AS p SET marks = changed.marks, ends = changed.ends
FROM unnest($1::text[], $2::text[], $3::int[], $4::text[], $5::json[]) AS changed (run_id, dataset, page, marks, ends)
WHERE p.run_id = changed.run_id AND p.dataset = changed.dataset AND p.page = changed.page

-- name: write_rows
-- Settled rows, in the order of their keys. An older or equal write stays, as `marks.replaces` says. A write without cells (input, values and
-- meta null as far as it has none; meta decides) leaves the cells that stand there. A row that was to be worked again and was not stands as it stood,
-- with its error.
INSERT INTO sheet_rows AS r
    (sheet_id, row_key, run_number, attempt, standing, status, shadows, input, values, meta, error, completed_at)
SELECT w.sheet_id, w.row_key, w.run_number, w.attempt, w.standing, w.status, w.shadows, w.input, w.values, w.meta, w.error,
       CASE WHEN w.status = 'completed' THEN now() END
FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::int[], $5::smallint[], $6::text[], $7::boolean[], $8::json[], $9::json[], $10::json[],
            $11::json[])
    AS w (sheet_id, row_key, run_number, attempt, standing, status, shadows, input, values, meta, error)
ON CONFLICT (sheet_id, row_key) DO UPDATE SET
    run_number = EXCLUDED.run_number,
    attempt = EXCLUDED.attempt,
    standing = EXCLUDED.standing,
    status = EXCLUDED.status,
    error = CASE WHEN EXCLUDED.error ->> 'code' = 'not_retried' THEN coalesce(r.error, EXCLUDED.error) ELSE EXCLUDED.error END,
    completed_at = EXCLUDED.completed_at,
    cells_kept = CASE WHEN EXCLUDED.error ->> 'code' = 'not_retried' AND r.error IS NOT NULL THEN r.cells_kept
        ELSE EXCLUDED.meta IS NULL AND r.meta IS NOT NULL END,
    shadows = CASE WHEN EXCLUDED.meta IS NULL AND r.meta IS NOT NULL THEN r.shadows ELSE EXCLUDED.shadows END,
    input = CASE WHEN EXCLUDED.meta IS NULL AND r.meta IS NOT NULL THEN r.input ELSE EXCLUDED.input END,
    values = CASE WHEN EXCLUDED.meta IS NULL AND r.meta IS NOT NULL THEN r.values ELSE EXCLUDED.values END,
    meta = coalesce(EXCLUDED.meta, r.meta)
WHERE (EXCLUDED.run_number, EXCLUDED.attempt) > (r.run_number, r.attempt)
   OR (EXCLUDED.run_number, EXCLUDED.attempt) = (r.run_number, r.attempt)
      AND (r.standing = 0 AND EXCLUDED.standing > 0 OR r.standing = 1 AND EXCLUDED.standing > 1)

-- name: lock_rows
-- Sheet rows, locked in the order of their keys until the transaction ends, as far as they still are what was seen.
SELECT r.sheet_id, r.row_key
FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::int[]) AS seen (sheet_id, row_key, run_number, attempt)
JOIN sheet_rows AS r ON r.sheet_id = seen.sheet_id AND r.row_key = seen.row_key
WHERE r.run_number = seen.run_number AND r.attempt = seen.attempt
ORDER BY r.sheet_id, r.row_key
FOR UPDATE OF r

-- name: renew_inputs
-- The current run's input columns of reused rows that this transaction has locked. Cells stay; the row now is this run's.
UPDATE sheet_rows AS r SET input = renewed.input, shadows = renewed.shadows, run_number = renewed.run_number, attempt = 1, standing = 3
FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::json[], $5::boolean[]) AS renewed (sheet_id, row_key, run_number, input, shadows)
WHERE r.sheet_id = renewed.sheet_id AND r.row_key = renewed.row_key

-- name: raise_counts
-- Add to counts and raise their version, in the order of their keys; returns them as they are then.
INSERT INTO dataset_counts AS c
    (run_id, dataset, sheet_id, run_number, version, admitted, completed, failed, cancelled, reused, duplicates, calls, cost, first_error)
SELECT t.run_id, t.dataset, t.sheet_id, t.run_number, 1, t.admitted, t.completed, t.failed, t.cancelled, t.reused, t.duplicates, t.calls, t.cost,
       t.first_error
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[],
            $10::bigint[], $11::bigint[], $12::numeric[], $13::json[])
    AS t (run_id, dataset, sheet_id, run_number, admitted, completed, failed, cancelled, reused, duplicates, calls, cost, first_error)
ON CONFLICT (run_id, dataset) DO UPDATE SET
    version = c.version + 1,
    admitted = c.admitted + EXCLUDED.admitted,
    completed = c.completed + EXCLUDED.completed,
    failed = c.failed + EXCLUDED.failed,
    cancelled = c.cancelled + EXCLUDED.cancelled,
    reused = c.reused + EXCLUDED.reused,
    duplicates = c.duplicates + EXCLUDED.duplicates,
    calls = c.calls + EXCLUDED.calls,
    cost = c.cost + EXCLUDED.cost,
    first_error = CASE WHEN c.failed + EXCLUDED.failed > 0 THEN coalesce(c.first_error, EXCLUDED.first_error) END
RETURNING *

-- name: read_counts
SELECT c.* FROM unnest($1::text[], $2::text[]) AS wanted (run_id, dataset)
JOIN dataset_counts AS c ON c.run_id = wanted.run_id AND c.dataset = wanted.dataset

-- name: read_counts_and_open_pages
-- The counts of a dataset with each page that has open rows, from one snapshot: a newer version with an older page would never be corrected.
SELECT c.*, p.page, length(p.marks) - length(replace(p.marks, 's', '')) AS open
FROM dataset_counts AS c
LEFT JOIN pages AS p ON p.run_id = c.run_id AND p.dataset = c.dataset AND p.marks LIKE '%s%'
WHERE c.run_id = $1 AND c.dataset = $2
ORDER BY p.page

-- name: read_pages
-- The page records that hold rows with indexes from $3 to below $4, in input order.
SELECT p.run_id, p.dataset, p.page, p.sheet_id, p.first_index, p.marks, p.row_keys, p.ends, p.inputs
FROM pages AS p
WHERE p.run_id = $1 AND p.dataset = $2 AND p.first_index < $4
  AND p.first_index >= coalesce(
      (SELECT before.first_index FROM pages AS before WHERE before.run_id = $1 AND before.dataset = $2 AND before.first_index <= $3
       ORDER BY before.first_index DESC LIMIT 1), 0)
ORDER BY p.first_index

-- name: read_last_page
-- Where the rows recorded so far end: one past the last index.
SELECT p.first_index + p.row_count AS past FROM pages AS p WHERE p.run_id = $1 AND p.dataset = $2 ORDER BY p.first_index DESC LIMIT 1

-- name: read_cells
-- Rows of a sheet in the order asked for, up to the row with which they come to $3 bytes; $4: with meta. A row that is not stored has no status.
SELECT s.status, s.shadows, s.cells_kept, s.input, s.values, s.meta, s.error
FROM (
    SELECT wanted.position, r.status, r.shadows, r.cells_kept, r.input, r.values, r.error,
           CASE WHEN $4 THEN r.meta END AS meta, size.bytes, sum(size.bytes) OVER (ORDER BY wanted.position) AS total
    FROM unnest($2::bytea[]) WITH ORDINALITY AS wanted (row_key, position)
    LEFT JOIN sheet_rows AS r ON r.sheet_id = $1 AND r.row_key = wanted.row_key
    CROSS JOIN LATERAL (SELECT coalesce(octet_length(r.input::text), 0) + coalesce(octet_length(r.values::text), 0)
                               + CASE WHEN $4 THEN coalesce(octet_length(r.meta::text), 0) ELSE 0 END AS bytes) AS size
) AS s
WHERE s.total - s.bytes < $3
ORDER BY s.position

-- name: add_owed
INSERT INTO events_owed (event_id, routing_key, message_type, run_id, body)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bytea[])
ON CONFLICT (event_id) DO NOTHING

-- name: read_owed
-- Owed events by id, after $1: one round looks at each of them once, whatever became of those before.
SELECT event_id, routing_key, message_type, run_id, body FROM events_owed WHERE event_id > $1 ORDER BY event_id LIMIT $2

-- name: delete_owed
DELETE FROM events_owed WHERE event_id = ANY($1::text[])

-- name: become_reader
-- For what is left of a transaction that will be rolled back: may only read the views, for $1 milliseconds a statement, planned as usual.
SELECT set_config('statement_timeout', $1, true), set_config('transaction_read_only', 'on', true), set_config('search_path', 'sheet_views', true),
       set_config('enable_hashjoin', 'on', true), set_config('enable_mergejoin', 'on', true), set_config('enable_seqscan', 'on', true),
       set_config('role', 'rowmill_sheet_reader', true)
