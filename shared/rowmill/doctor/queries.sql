-- What the doctor reads of the services' tables: one run's books. Nothing here writes, and nothing waits for a lock that a service holds.

-- name: run
SELECT run_id, state, waiting_for, stop_reason, halt_reason, lease_until > now() AS leased,
       extract(epoch FROM now() - coalesce(lease_until, greatest(changed_at, advanced_at)))::float8 AS unheld_for
FROM admission.runs WHERE run_id = $1

-- name: datasets
-- waiting: rows in waits that have not come back.
SELECT d.dataset, d.state, d.admission_done, d.admitted, d.version, d.completed, d.failed, d.cancelled, d.reused, d.duplicates, d.calls, d.cost,
       i.state AS input_state, d.input_id,
       extract(epoch FROM now() - coalesce(d.feeder_until, d.opened_at))::float8 AS unfed_for,
       extract(epoch FROM now() - d.counted_at)::float8 AS silent_for,
       (SELECT count(*) FROM admission.waits w WHERE w.dataset_seq = d.dataset_seq AND w.state <> 'released') AS waiting,
       (SELECT extract(epoch FROM now() - min(coalesce(w.released_at, w.due_at)))::float8 FROM admission.waits w
        WHERE w.dataset_seq = d.dataset_seq AND w.state <> 'released') AS due_since
FROM admission.datasets d LEFT JOIN admission.inputs i ON i.input_id = d.input_id
WHERE d.run_id = $1 ORDER BY d.dataset_seq

-- name: counts
SELECT dataset, version, admitted, completed, failed, cancelled, reused, duplicates, calls, cost FROM sheets.dataset_counts WHERE run_id = $1

-- name: pages
-- Of one dataset, in the order of their numbers, from $3 on.
SELECT page, first_index, row_count, marks, row_keys, ends, sheet_id FROM sheets.pages
WHERE run_id = $1 AND dataset = $2 AND page >= $3 ORDER BY page LIMIT 200

-- name: sheet_rows
-- Which of these keys have a row in the sheet: its status where the last write was this run's.
SELECT r.row_key, CASE WHEN r.run_number = (SELECT number FROM admission.runs WHERE run_id = $3) THEN r.status END AS status
FROM sheets.sheet_rows r WHERE r.sheet_id = $1 AND r.row_key = ANY($2::bytea[])

-- name: owed
-- Messages that a commit called for and nobody has confirmed.
SELECT message_type, count(*) AS messages, extract(epoch FROM now() - min(owed_at))::float8 AS age
FROM admission.owed WHERE run_id = $1 GROUP BY message_type ORDER BY message_type

-- name: events_owed
SELECT message_type, count(*) AS messages, extract(epoch FROM now() - min(noted_at))::float8 AS age
FROM sheets.events_owed WHERE run_id = $1 GROUP BY message_type ORDER BY message_type

-- name: leases
-- Receipts of the run whose lease has run out and that nobody has taken over or settled.
SELECT encode(key, 'hex') AS key, tool, state, holder, extract(epoch FROM now() - expires_at)::float8 AS expired_for
FROM receipts.receipts WHERE run_id = $1 AND state IN ('queued', 'running') AND expires_at < now() ORDER BY expires_at LIMIT 1000

-- name: unknown_outcomes
SELECT count(*) FROM receipts.receipts WHERE run_id = $1 AND state = 'outcome_unknown'

-- name: charges
-- What the run was charged: by its charges (null: there are none), by what is told of it, by the account of its budget (null: it has none), and by what
-- admission heard last. counted: its charges that are one call each.
SELECT c.charged, c.counted, t.told, t.calls, t.version, a.charged AS account, r.charged AS heard, r.calls AS heard_calls, r.charges_version AS heard_version
FROM (
    SELECT sum(coalesce(spent, reserved)) AS charged,
           coalesce(sum(CASE WHEN calls + retries > 0 THEN calls + retries WHEN reserved > 0 AND key <> '' THEN 1 ELSE 0 END), 0)::bigint AS counted
    FROM receipts.charges WHERE run_id = $1
) c, (
    SELECT coalesce(sum(charged), 0) AS told, coalesce(sum(calls), 0)::bigint AS calls, coalesce(sum(changes), 0)::bigint AS version
    FROM receipts.tallies WHERE run_id = $1
) t, admission.runs r LEFT JOIN receipts.runs a USING (run_id)
WHERE r.run_id = $1

-- name: unfinished
SELECT count(*) FROM admission.runs WHERE state NOT IN ('completed', 'failed', 'cancelled')
