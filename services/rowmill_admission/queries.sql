-- ==== runs =================================================================================================================================

-- name: lock_run_id
-- RunStart and RunStop of one run may arrive at once, before there is a row to lock.
SELECT pg_advisory_xact_lock(hashtextextended($1, 0))

-- name: known_of_identity
-- Of the newest run that this message may be a repetition of, how old it is; how many there are; a stop that came before.
SELECT (SELECT extract(epoch FROM now() - created_at)::float8 FROM runs WHERE identity = $1 ORDER BY number DESC LIMIT 1) AS age,
       (SELECT count(*) FROM runs WHERE identity = $1) AS runs, (SELECT reason FROM stops WHERE run_id = $1) AS stop_reason

-- name: insert_run
INSERT INTO runs (run_id, identity, org, play, state, input, inputs, options, stop_reason, finished_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, CASE WHEN $5 = 'cancelled' THEN clock_timestamp() END)
ON CONFLICT (run_id) DO NOTHING
RETURNING *, false AS lease_live, extract(epoch FROM created_at)::float8 AS created, extract(epoch FROM finished_at)::float8 AS finished

-- name: insert_run_inputs
INSERT INTO run_inputs (input_id, run_id) SELECT input_id, $2 FROM unnest($1::text[]) AS input_id ON CONFLICT DO NOTHING

-- name: insert_stop
INSERT INTO stops (run_id, reason) VALUES ($1, $2) ON CONFLICT (run_id) DO NOTHING

-- name: stop_stored
SELECT EXISTS (SELECT FROM stops WHERE run_id = $1)

-- name: lock_run
-- A run, locked until the transaction ends. lease_live by the clock as it is now, not at the transaction's start.
SELECT *, coalesce(lease_until > clock_timestamp(), false) AS lease_live,
       extract(epoch FROM created_at)::float8 AS created, extract(epoch FROM finished_at)::float8 AS finished
FROM runs WHERE run_id = $1 FOR UPDATE

-- name: read_run
SELECT *, coalesce(lease_until > clock_timestamp(), false) AS lease_live,
       extract(epoch FROM created_at)::float8 AS created, extract(epoch FROM finished_at)::float8 AS finished
FROM runs WHERE run_id = $1

-- name: settle_runs
-- Wait for the runs that are being stored, and let none be stored before our commit.
LOCK TABLE runs IN SHARE MODE

-- name: oldest_run
SELECT extract(epoch FROM min(created_at))::float8 FROM runs WHERE state IN ('queued', 'running', 'waiting')

-- name: oldest_run_to_retry
-- The oldest run that is being retried, or could be: $1 seconds after its datasets ended, and an hour for requests that are being decided.
SELECT extract(epoch FROM min(created_at))::float8 FROM (
    SELECT created_at FROM runs WHERE state IN ('queued', 'running', 'waiting')
    UNION ALL SELECT created_at FROM runs WHERE retrying
    UNION ALL SELECT r.created_at FROM datasets d JOIN runs r USING (run_id) WHERE d.state = 'open'
    UNION ALL SELECT r.created_at FROM datasets d JOIN runs r USING (run_id)
    WHERE d.state <> 'open' AND d.closed_at >= now() - make_interval(secs => $1::float8 + 3600)
        AND (d.failed > 0 OR d.error IS NOT NULL OR (r.state = 'failed' AND d.cancelled > 0)) AND r.state IN ('completed', 'failed')
) needed

-- name: list_runs
SELECT *, coalesce(lease_until > clock_timestamp(), false) AS lease_live,
       extract(epoch FROM created_at)::float8 AS created, extract(epoch FROM finished_at)::float8 AS finished
FROM runs
WHERE ($1::text IS NULL OR org = $1) AND ($2::text IS NULL OR play = $2) AND ($3::text IS NULL OR state = $3) AND ($5::bigint IS NULL OR number < $5)
ORDER BY number DESC LIMIT $4

-- name: take_run
-- The lease goes to $2 for $3 seconds under the next term; the body sees every change up to now. While it runs nobody is waited for, unless the run
-- is halted as a whole: what it waited for a person ends here, and puts off the end of its wall time.
UPDATE runs SET term = term + 1, lease_id = $2, lease_until = clock_timestamp() + make_interval(secs => $3), state = 'running', waiting_for = NULL,
       advance_wanted = false, advances = 0, changed_at = now(),
       halted_seconds = CASE WHEN halted_at IS NULL OR halt_reason IS NOT NULL THEN halted_seconds
           ELSE halted_seconds + extract(epoch FROM clock_timestamp() - halted_at)::float8 END,
       deadline = CASE WHEN halted_at IS NULL OR halt_reason IS NOT NULL THEN deadline ELSE deadline + (clock_timestamp() - halted_at) END,
       halted_at = CASE WHEN halt_reason IS NOT NULL THEN halted_at END
WHERE run_id = $1 RETURNING term

-- name: renew_run
UPDATE runs SET lease_until = clock_timestamp() + make_interval(secs => $2) WHERE run_id = $1

-- name: release_run
-- The lease ends; what becomes of the state is set by the statements below.
UPDATE runs SET lease_until = NULL, released_term = term, advance_wanted = false, changed_at = now() WHERE run_id = $1

-- name: set_run_waiting
UPDATE runs SET state = 'waiting', waiting_for = $2, changed_at = now(),
       halted_at = CASE WHEN starts_with($2, 'halted:') THEN coalesce(halted_at, clock_timestamp()) ELSE halted_at END
WHERE run_id = $1

-- name: halt_run
-- From now on it waits for a person, which is not counted to its wall time.
UPDATE runs SET state = 'waiting', waiting_for = $2, halt_reason = $2, changed_at = now(), halted_at = coalesce(halted_at, clock_timestamp())
WHERE run_id = $1

-- name: decide_run
-- The number of the decision that is being taken, and when the run's wall time of $2 seconds is over (null: never) if it goes on from now: its start
-- and all that it has waited for a person up to now come before.
UPDATE runs SET
    decision = decision + 1,
    halted_seconds = halted_seconds + coalesce(extract(epoch FROM clock_timestamp() - halted_at)::float8, 0),
    halted_at = CASE WHEN halted_at IS NOT NULL THEN clock_timestamp() END,
    deadline = created_at
        + make_interval(secs => halted_seconds + coalesce(extract(epoch FROM clock_timestamp() - halted_at)::float8, 0) + $2::float8)
WHERE run_id = $1 RETURNING decision, extract(epoch FROM deadline)::float8 AS deadline

-- name: worked_seconds
-- For how long a run was worked, so as its wall time counts it.
SELECT extract(epoch FROM coalesce(halted_at, clock_timestamp()) - created_at)::float8 - halted_seconds FROM runs WHERE run_id = $1

-- name: run_out_of_time
SELECT coalesce(deadline <= clock_timestamp(), false) AND halted_at IS NULL FROM runs WHERE run_id = $1

-- name: runs_out_of_time
-- Runs that go on though their wall time is over.
SELECT run_id FROM runs
WHERE state IN ('queued', 'running', 'waiting') AND stop_reason IS NULL AND halt_reason IS NULL AND halted_at IS NULL AND deadline <= clock_timestamp()
ORDER BY number LIMIT 1000

-- name: set_options
UPDATE runs SET options = $2 WHERE run_id = $1

-- name: note_halt
-- Whether a run whose retry is being prepared is to wait for a person once it is ($2: for what; null: not any more).
UPDATE runs SET halt_reason = $2 WHERE run_id = $1

-- name: newest_decision
SELECT decision FROM runs WHERE run_id = $1

-- name: resume_run
-- The halt is lifted. Its body runs anew: one that was never taken is queued.
UPDATE runs SET state = CASE term WHEN 0 THEN 'queued' ELSE 'running' END, waiting_for = NULL, halt_reason = NULL, resumed_at = clock_timestamp(),
       halted_at = NULL, changed_at = now()
WHERE run_id = $1

-- name: resumed_within
-- Whether a run was resumed at most $2 seconds ago.
SELECT coalesce(resumed_at > clock_timestamp() - make_interval(secs => $2::float8), false) FROM runs WHERE run_id = $1

-- name: finish_run
UPDATE runs SET state = $2, output = $3, error = $4, waiting_for = NULL, lease_until = NULL, finished_at = now(), changed_at = now() WHERE run_id = $1

-- name: store_charges
-- What runs were charged, where it is newer than what was heard before.
UPDATE runs r SET charged = n.charged, calls = n.calls, charges_version = n.version
FROM (
    SELECT l.run_id, c.version, c.charged, c.calls
    FROM unnest($1::text[], $2::bigint[], $3::numeric[], $4::bigint[]) AS c (run_id, version, charged, calls) JOIN runs l USING (run_id)
    WHERE l.charges_version < c.version ORDER BY l.run_id FOR NO KEY UPDATE OF l
) n
WHERE r.run_id = n.run_id AND r.charges_version < n.version

-- name: stop_run
UPDATE runs SET stop_reason = $2, changed_at = now() WHERE run_id = $1

-- name: want_advance
UPDATE runs SET advance_wanted = true WHERE run_id = $1

-- name: note_advance
UPDATE runs SET advanced_at = now(), changed_at = now() WHERE run_id = $1

-- name: note_advance_again
UPDATE runs SET advanced_at = now(), advances = advances + 1 WHERE run_id = $1

-- name: runs_to_advance_again
-- Unfinished runs that nobody holds, whose body should run: never taken, taken by someone who died, or released at something that has happened since.
-- Asked for again after $1 seconds, doubling to $2.
SELECT run_id FROM runs
WHERE state IN ('queued', 'running', 'waiting') AND stop_reason IS NULL AND halt_reason IS NULL
  AND coalesce(lease_until < now(), true)
  AND (state <> 'waiting' OR advance_wanted
       OR (waiting_for LIKE 'dataset:%' AND NOT EXISTS (SELECT FROM datasets d WHERE d.run_id = runs.run_id AND d.state = 'open')))
  AND greatest(advanced_at, changed_at) < now() - make_interval(secs => least($2::float8, $1::float8 * 2 ^ least(advances, 20)))
ORDER BY number LIMIT 1000

-- name: runs_waiting_for
SELECT run_id FROM runs WHERE state = 'waiting' AND waiting_for = $1 AND stop_reason IS NULL ORDER BY run_id

-- name: insert_calls
INSERT INTO recorded_calls (run_id, position, kind, name, request, result)
SELECT $1, * FROM unnest($2::int[], $3::text[], $4::text[], $5::text[], $6::json[]) ON CONFLICT DO NOTHING

-- name: calls_of
SELECT position, kind, name, request, result FROM recorded_calls WHERE run_id = $1 ORDER BY position

-- name: insert_event
INSERT INTO events (event_id, name, key, payload) VALUES ($1, $2, $3, $4) ON CONFLICT (event_id) DO NOTHING

-- name: forget_events
DELETE FROM events WHERE arrived_at < now() - make_interval(secs => $1)

-- ==== what is owed =========================================================================================================================

-- name: insert_owed
INSERT INTO owed (run_id, lane, exchange, key, message_type, body, asked)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::bool[])

-- name: owed_of
SELECT owed_id, lane, exchange, key, message_type, body, asked FROM owed WHERE run_id = $1 ORDER BY owed_id LIMIT 200

-- name: delete_owed
DELETE FROM owed WHERE owed_id = ANY($1::bigint[])

-- name: give_up_owed
-- A question that died of a run.
DELETE FROM owed WHERE run_id = $1 AND asked AND body = $2 RETURNING owed_id

-- name: runs_owing
-- Runs with a message that nobody has confirmed for $1 seconds.
SELECT run_id FROM owed WHERE owed_at < now() - make_interval(secs => $1) GROUP BY run_id ORDER BY min(owed_id) LIMIT 1000

-- ==== inputs ===============================================================================================================================

-- name: ensure_inputs
INSERT INTO inputs (input_id) SELECT input_id FROM unnest($1::text[]) AS input_id ORDER BY input_id ON CONFLICT DO NOTHING

-- name: lock_inputs
SELECT * FROM inputs WHERE input_id = ANY($1::text[]) ORDER BY input_id FOR UPDATE

-- name: touch_inputs
-- A run that starts with an input gives it the full time to be sealed.
UPDATE inputs SET changed_at = now() WHERE input_id = ANY($1::text[]) AND state = 'open'

-- name: insert_whole_input
INSERT INTO inputs (input_id, state, pages, rows, seal_pages, seal_rows) VALUES ($1, 'sealed', $2, $3, $2, $3)
ON CONFLICT (input_id) DO NOTHING RETURNING input_id

-- name: insert_input_pages
INSERT INTO input_pages (input_id, page, rows, digest, body)
SELECT * FROM unnest($1::text[], $2::int[], $3::int[], $4::bytea[], $5::bytea[]) ON CONFLICT DO NOTHING RETURNING input_id, page, rows

-- name: page_digests_among
SELECT p.input_id, p.page, p.digest FROM input_pages p JOIN unnest($1::text[], $2::int[]) AS wanted (input_id, page) USING (input_id, page)

-- name: raise_input
UPDATE inputs SET pages = pages + $2, rows = rows + $3, changed_at = now() WHERE input_id = $1

-- name: note_seal
UPDATE inputs SET seal_pages = $2, seal_rows = $3, seal_digest = $4, changed_at = now() WHERE input_id = $1

-- name: whole_input
SELECT page, rows, digest FROM input_pages WHERE input_id = $1 ORDER BY page

-- name: end_input
UPDATE inputs SET state = $2, error = $3, changed_at = now() WHERE input_id = $1

-- name: runs_of_input
SELECT run_id FROM run_inputs WHERE input_id = $1 UNION SELECT run_id FROM datasets WHERE input_id = $1 AND state = 'open' ORDER BY run_id

-- name: inputs_abandoned
SELECT input_id FROM inputs WHERE state = 'open' AND changed_at < now() - make_interval(secs => $1) ORDER BY input_id LIMIT 1000

-- name: read_input_pages
-- The next pages from $2 on, at most $3 of them and about $4 bytes; at least one.
SELECT page, rows, body FROM (
    SELECT page, rows, body, coalesce(sum(octet_length(body)) OVER (ORDER BY page ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
    FROM input_pages WHERE input_id = $1 AND page >= $2 AND page < $2 + $3
) ahead WHERE before < $4 ORDER BY page

-- name: read_input
SELECT * FROM inputs WHERE input_id = $1

-- ==== datasets =============================================================================================================================

-- name: insert_dataset
-- The first one stored for (run, dataset) decides.
INSERT INTO datasets (run_id, dataset, input_id, definition, page_rows, row_limit, run_window)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (run_id, dataset) DO NOTHING RETURNING extract(epoch FROM opened_at)::float8

-- name: dataset_by_name
SELECT * FROM datasets WHERE run_id = $1 AND dataset = $2

-- name: lock_datasets
SELECT * FROM datasets WHERE dataset_seq = ANY($1::bigint[]) ORDER BY dataset_seq FOR UPDATE

-- name: open_among
SELECT dataset_seq FROM datasets WHERE dataset_seq = ANY($1::bigint[]) AND state = 'open'

-- name: datasets_of_runs
SELECT d.*, i.seal_rows FROM datasets d LEFT JOIN inputs i ON i.input_id = d.input_id AND i.state = 'sealed'
WHERE d.run_id = ANY($1::text[]) ORDER BY d.dataset_seq

-- name: any_open_dataset
SELECT EXISTS (SELECT FROM datasets WHERE run_id = $1 AND state = 'open')

-- name: close_dataset
UPDATE datasets SET state = $2, error = $3, closed_at = now(), feeder_until = NULL, reopened = false WHERE dataset_seq = $1
RETURNING extract(epoch FROM closed_at)::float8 AS at, (SELECT seal_rows FROM inputs i WHERE i.input_id = datasets.input_id AND i.state = 'sealed')

-- name: forget_waits_of
DELETE FROM waits WHERE dataset_seq = $1

-- name: store_counts
-- Absolute counts, the highest version wins. Locks the rows in order first, so that closing sees both sides.
UPDATE datasets d SET version = c.version, completed = c.completed, failed = c.failed, cancelled = c.cancelled, reused = c.reused,
       duplicates = c.duplicates, calls = c.calls, cost = c.cost, first_error = coalesce(c.first_error, d.first_error), counted_at = now()
FROM (
    SELECT l.dataset_seq, n.* FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
        $8::bigint[], $9::bigint[], $10::numeric[], $11::json[])
        AS n (run_id, dataset, version, completed, failed, cancelled, reused, duplicates, calls, cost, first_error)
    JOIN datasets l USING (run_id, dataset)
    ORDER BY l.dataset_seq FOR UPDATE OF l
) c
WHERE d.dataset_seq = c.dataset_seq AND d.version < c.version
RETURNING d.*

-- name: note_heard
-- The sheet-writer was asked and has nothing newer: the dataset is not silent.
UPDATE datasets SET counted_at = now() WHERE run_id = $1 AND dataset = $2

-- name: progress_due
-- The counts to tell of these datasets, where they are open and nothing was told for $2 seconds. Locks the rows in order first, as who counts does.
UPDATE datasets d SET progress_at = clock_timestamp()
FROM (SELECT dataset_seq FROM datasets WHERE dataset_seq = ANY($1::bigint[]) ORDER BY dataset_seq FOR UPDATE) o, runs r
WHERE d.dataset_seq = o.dataset_seq AND r.run_id = d.run_id AND d.state = 'open'
    AND coalesce(d.progress_at <= clock_timestamp() - make_interval(secs => $2), true)
RETURNING d.*, r.play, (SELECT seal_rows FROM inputs i WHERE i.input_id = d.input_id AND i.state = 'sealed') AS seal_rows

-- ==== feeding ==============================================================================================================================

-- name: take_feeders
-- Open datasets whose admission is not finished, that nobody feeds, and that can go on: the input is sealed (or failed), or the run has ended. One that
-- was reopened waits for the run's body, unless that will not come to it any more.
-- $5: those that this process feeds; a late renewal must not have it take over from itself.
UPDATE datasets d SET feeder_term = d.feeder_term + 1, feeder_id = $1, feeder_until = clock_timestamp() + make_interval(secs => $2)
FROM (
    SELECT o.dataset_seq FROM datasets o JOIN runs r ON r.run_id = o.run_id
    WHERE o.state = 'open' AND NOT o.admission_done AND coalesce(o.feeder_until < clock_timestamp(), true)
      AND ($3::text[] IS NULL OR o.input_id = ANY($3)) AND ($4::text IS NULL OR o.run_id = $4) AND o.dataset_seq <> ALL($5::bigint[])
      AND (r.stop_reason IS NOT NULL OR r.finished_at IS NOT NULL
           OR (NOT o.reopened AND EXISTS (SELECT FROM inputs i WHERE i.input_id = o.input_id AND i.state <> 'open')))
    ORDER BY o.dataset_seq LIMIT 1000 FOR UPDATE OF o SKIP LOCKED
) free
WHERE d.dataset_seq = free.dataset_seq
RETURNING d.dataset_seq

-- name: fed
-- All that a feeder needs to begin.
SELECT d.*, r.number, r.org, r.play, r.options, r.stop_reason, r.halt_reason, r.state AS run_state,
       extract(epoch FROM r.created_at)::float8 AS started_at, coalesce(extract(epoch FROM r.resumed_at), 0)::float8 AS resumed_at,
       i.state AS input_state, i.error AS input_error
FROM datasets d JOIN runs r ON r.run_id = d.run_id LEFT JOIN inputs i ON i.input_id = d.input_id
WHERE d.dataset_seq = $1

-- name: renew_feeders
-- Renew the leases that are still ours, and say what feeders must know.
UPDATE datasets d SET feeder_until = clock_timestamp() + make_interval(secs => $3)
FROM (
    SELECT o.dataset_seq FROM datasets o JOIN unnest($1::bigint[], $2::bigint[]) AS mine (dataset_seq, term)
        ON mine.dataset_seq = o.dataset_seq AND mine.term = o.feeder_term
    WHERE o.state = 'open' AND NOT o.admission_done ORDER BY o.dataset_seq FOR UPDATE OF o
) held, runs r
WHERE d.dataset_seq = held.dataset_seq AND r.run_id = d.run_id
RETURNING d.*, r.stop_reason, r.halt_reason, r.state AS run_state

-- name: release_feeders
UPDATE datasets d SET feeder_until = NULL
FROM (
    SELECT o.dataset_seq FROM datasets o JOIN unnest($1::bigint[], $2::bigint[]) AS mine (dataset_seq, term)
        ON mine.dataset_seq = o.dataset_seq AND mine.term = o.feeder_term
    ORDER BY o.dataset_seq FOR UPDATE OF o
) held
WHERE d.dataset_seq = held.dataset_seq

-- name: store_progress
-- How far the feeder is, in absolute numbers, and the pages that it published; renews its lease. No row: the lease was lost, nothing is stored.
WITH raised AS (
    UPDATE datasets d SET next_page = $3, next_index = $4, input_page = $5, input_offset = $6, admitted = $7, sent = $8, sent_bytes = $9,
           admission_done = $10, error = coalesce(d.error, $11::json),
           feeder_until = CASE WHEN $10 THEN NULL ELSE clock_timestamp() + make_interval(secs => $12) END
    FROM runs r
    WHERE d.dataset_seq = $1 AND d.feeder_term = $2 AND NOT d.admission_done AND r.run_id = d.run_id
    RETURNING d.*, r.stop_reason, r.halt_reason, r.state AS run_state
), stored AS (
    INSERT INTO pages (dataset_seq, page, first_index, rows, input_page, input_offset, duplicates, sent, bytes, digests)
    SELECT raised.dataset_seq, p.page, p.first_index, p.rows, p.input_page, p.input_offset, p.duplicates::int[], p.sent, p.bytes, p.digests
    FROM raised, unnest($13::int[], $14::bigint[], $15::int[], $16::int[], $17::int[], $18::text[], $19::int[], $20::int[], $21::bytea[])
         AS p (page, first_index, rows, input_page, input_offset, duplicates, sent, bytes, digests)
    ON CONFLICT DO NOTHING
)
SELECT * FROM raised

-- name: digests_of
SELECT page, digests FROM pages WHERE dataset_seq = $1 AND page >= $2 ORDER BY page LIMIT 500

-- name: flights
-- What every open dataset has at the executors, whoever feeds it. Not one to which the run's body has yet to come for a retry: its rows wait, and
-- would take the window from the datasets before it. Rows that were called back go before new ones until they are published, and for $1 seconds from when
-- that was begun for as long as any row is out: it may be one of them, and be sent back once more.
SELECT o.*, EXISTS (SELECT FROM waits w WHERE w.dataset_seq = o.dataset_seq AND w.called_back AND w.state <> 'released')
       OR o.sent - o.ended > o.waiting AND EXISTS (
           SELECT FROM waits w WHERE w.dataset_seq = o.dataset_seq AND w.called_back AND w.state = 'released'
               AND w.released_at > (SELECT clock_timestamp()) - make_interval(secs => $1)) AS called_back
FROM (
    SELECT d.dataset_seq, d.run_id, r.org, d.run_window, d.sent, d.sent_bytes, d.completed + d.failed + d.cancelled AS ended,
           (SELECT count(*) FROM waits w WHERE w.dataset_seq = d.dataset_seq AND w.state = 'waiting') AS waiting
    FROM datasets d JOIN runs r ON r.run_id = d.run_id
    WHERE d.state = 'open' AND NOT d.reopened AND d.sent > d.completed + d.failed + d.cancelled
    OFFSET 0  -- counted once
) o

-- ==== waiting ==============================================================================================================================

-- name: store_waits
-- A row's newest wait decides; an older or repeated RowsParked changes nothing. $7: milliseconds, null: until something happens. A row that was called
-- back stays so for as long as its provider is not away again ($12).
INSERT INTO waits (dataset_seq, row_index, key, page, attempt, waits, due_at, asked, reason, halted, provider)
SELECT $1, n.row_index, n.key, n.page, n.attempt, n.waits, clock_timestamp() + make_interval(secs => n.wait_ms / 1000.0), n.asked, $10, $11,
       n.provider
FROM unnest($2::bigint[], $3::text[], $4::int[], $5::int[], $6::int[], $7::bigint[], $8::float8[], $9::text[])
     AS n (row_index, key, page, attempt, waits, wait_ms, asked, provider)
ORDER BY n.row_index
ON CONFLICT (dataset_seq, row_index) DO UPDATE SET attempt = excluded.attempt, waits = excluded.waits, state = 'waiting', due_at = excluded.due_at,
       asked = excluded.asked, reason = excluded.reason, halted = excluded.halted, provider = excluded.provider, released_at = NULL,
       called_back = waits.called_back AND NOT excluded.halted AND NOT excluded.row_index = ANY($12::bigint[])
WHERE (excluded.attempt, excluded.waits) > (waits.attempt, waits.waits)

-- name: end_halts
-- Rows that wait for their run to be resumed are due from now on.
UPDATE waits w SET due_at = clock_timestamp(), halted = false
FROM (
    SELECT o.dataset_seq, o.row_index FROM waits o JOIN datasets d USING (dataset_seq)
    WHERE d.run_id = $1 AND o.state = 'waiting' AND o.halted ORDER BY o.dataset_seq, o.row_index FOR UPDATE OF o
) halted
WHERE w.dataset_seq = halted.dataset_seq AND w.row_index = halted.row_index

-- name: provider_serves
-- A provider serves again: rows of an organisation that wait for it are called back, of runs that go on. In turns of $6 rows of each run, the oldest
-- first, beginning with the run of which none came to that provider for longest, whatever called them: $4 of them now (or as many turns later), and then
-- $5 at a time, $3 a second. Those whose turn comes after $7 others keep their time until they are told anew. $8: it was not away, but has nothing to
-- do; then none comes later than it would, rows that were not admitted yet do not wait for them, and no more are looked at than have a turn. Of those
-- that come together each is due a microsecond after the one before, so that they are released in turn, and so is who came longer ago the next time.
-- Rows are found by their key, one by one (OFFSET 0: by nothing else), and changed where they lie: however many the planner thinks there are, it cannot
-- join them badly.
WITH going AS MATERIALIZED (
    SELECT d.dataset_seq, r.number AS run, (
        SELECT max(w.released_at) FROM waits w
        WHERE w.provider = $2 AND w.provider <> '' AND w.dataset_seq = d.dataset_seq AND w.state <> 'waiting'
    ) AS came
    FROM runs r JOIN datasets d USING (run_id)
    WHERE r.org = $1 AND r.state IN ('queued', 'running', 'waiting')
      AND r.halt_reason IS NULL AND r.stop_reason IS NULL AND r.finished_at IS NULL AND d.state = 'open'
), lately AS MATERIALIZED (
    SELECT dataset_seq, run, max(came) OVER (PARTITION BY run) AS came FROM going
), waiting AS MATERIALIZED (
    SELECT g.dataset_seq, o.row_index, o.called_back, g.run, g.came,
           row_number() OVER (PARTITION BY g.run ORDER BY o.asked NULLS FIRST, g.dataset_seq, o.row_index) - 1 AS place
    FROM lately g CROSS JOIN LATERAL (
        SELECT w.row_index, w.called_back, w.asked FROM waits w
        WHERE w.provider = $2 AND w.provider <> '' AND w.dataset_seq = g.dataset_seq AND w.state = 'waiting' AND NOT w.halted
        ORDER BY w.asked NULLS FIRST, w.row_index LIMIT CASE WHEN $8::bool THEN $7::int END
    ) o
), turns AS MATERIALIZED (
    SELECT *, row_number() OVER (ORDER BY place / $6::int, came NULLS FIRST, run, place) - 1 AS turn FROM waiting
), told AS MATERIALIZED (
    SELECT dataset_seq, row_index, CASE
        WHEN turn >= $7::int THEN NULL
        WHEN turn < $4::int THEN now() - ($4::int - turn) * interval '1 microsecond'
        ELSE now() + turn * interval '1 microsecond' + make_interval(secs => ((turn - $4::int) / $5::int + 1) * $5::int / $3::float8) END AS due_at
    FROM turns WHERE turn < $7::int OR NOT (called_back OR $8::bool)
), ours AS MATERIALIZED (
    SELECT found.at, told.due_at
    FROM told CROSS JOIN LATERAL (
        SELECT w.ctid AS at, w.state, w.due_at FROM waits w
        WHERE w.dataset_seq = told.dataset_seq AND w.row_index = told.row_index OFFSET 0 FOR UPDATE SKIP LOCKED
    ) found
    WHERE found.state = 'waiting' AND (NOT $8::bool OR found.due_at > told.due_at)
), changed AS (
    UPDATE waits w SET called_back = w.called_back OR NOT $8::bool, due_at = coalesce(ours.due_at, w.due_at) FROM ours WHERE w.ctid = ours.at
    RETURNING 1
)
SELECT EXISTS (SELECT FROM changed) AS changed

-- name: release_due
-- Rows whose time has come, of runs that go on: in turn by organisation, then by run, of each run those first whose call was asked for first. Not of
-- the datasets $2. Rows of runs that are halted stay due, however many: none of them is looked at. $3: how many are, those that were due first; each
-- organisation has its part of them, and each of its datasets a part of that. When each was released tells whose turn it was first.
WITH going AS MATERIALIZED (
    SELECT d.dataset_seq, d.run_id, r.org, count(*) OVER (PARTITION BY r.org) AS of_org
    FROM runs r JOIN datasets d USING (run_id) CROSS JOIN LATERAL (
        SELECT FROM waits w WHERE w.dataset_seq = d.dataset_seq AND w.state = 'waiting' AND w.due_at <= (SELECT clock_timestamp())
        ORDER BY w.due_at LIMIT 1
    ) due
    WHERE r.state IN ('queued', 'running', 'waiting') AND r.halt_reason IS NULL AND r.stop_reason IS NULL AND r.finished_at IS NULL
      AND d.state = 'open' AND d.dataset_seq <> ALL($2::bigint[])
), due AS (
    SELECT g.dataset_seq, g.run_id, g.org, o.row_index, o.due_at, o.asked
    FROM going g CROSS JOIN LATERAL (
        SELECT w.row_index, w.due_at, w.asked FROM waits w
        WHERE w.dataset_seq = g.dataset_seq AND w.state = 'waiting' AND w.due_at <= (SELECT clock_timestamp())
        ORDER BY w.due_at LIMIT greatest(1, $3::bigint / (SELECT count(DISTINCT org) FROM going) / g.of_org)
    ) o
), of_run AS (SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY asked NULLS FIRST, due_at) AS run_turn FROM due
), of_org AS (SELECT *, row_number() OVER (PARTITION BY org ORDER BY run_turn, due_at) AS org_turn FROM of_run
), picked AS (SELECT dataset_seq, row_index, row_number() OVER (ORDER BY org_turn, due_at) AS place FROM of_org ORDER BY place LIMIT $1
), ours AS MATERIALIZED (
    SELECT found.at, p.place FROM picked p CROSS JOIN LATERAL (
        SELECT w.ctid AS at, w.state FROM waits w WHERE w.dataset_seq = p.dataset_seq AND w.row_index = p.row_index OFFSET 0 FOR UPDATE SKIP LOCKED
    ) found WHERE found.state = 'waiting'
)
UPDATE waits w SET state = 'releasing', released_at = now() + ours.place * interval '1 microsecond' FROM ours WHERE w.ctid = ours.at RETURNING w.*

-- name: release_ended
-- Rows that wait for nothing any more: their run was stopped, or has ended otherwise.
UPDATE waits w SET state = 'releasing', released_at = clock_timestamp()
FROM (
    SELECT o.dataset_seq, o.row_index FROM datasets d JOIN runs r ON r.run_id = d.run_id JOIN waits o ON o.dataset_seq = d.dataset_seq
    WHERE d.state = 'open' AND (r.stop_reason IS NOT NULL OR r.finished_at IS NOT NULL) AND o.state = 'waiting' AND d.dataset_seq <> ALL($2::bigint[])
    ORDER BY o.dataset_seq, o.row_index LIMIT $1 FOR UPDATE OF o SKIP LOCKED
) due
WHERE w.dataset_seq = due.dataset_seq AND w.row_index = due.row_index RETURNING w.*

-- name: release_stuck
-- Rows that somebody began to publish $2 seconds ago and did not finish; those that fail again and again after those that were not tried for longest.
-- They are called back no more: new rows of their run are not to wait for what perhaps cannot be published.
UPDATE waits w SET released_at = clock_timestamp(), called_back = false
FROM (
    SELECT dataset_seq, row_index FROM waits
    WHERE state = 'releasing' AND released_at < clock_timestamp() - make_interval(secs => $2) AND dataset_seq <> ALL($3::bigint[])
    ORDER BY released_at LIMIT $1 FOR UPDATE SKIP LOCKED
) due
WHERE w.dataset_seq = due.dataset_seq AND w.row_index = due.row_index RETURNING w.*

-- name: released
-- Unless the row waits anew.
UPDATE waits w SET state = 'released' FROM unnest($2::bigint[], $3::int[]) AS n (row_index, waits)
WHERE w.dataset_seq = $1 AND w.row_index = n.row_index AND w.waits = n.waits AND w.state = 'releasing'

-- name: rows_waiting
-- How many rows of a run wait for each provider.
SELECT w.provider, count(*) AS rows FROM waits w JOIN datasets d USING (dataset_seq)
WHERE d.run_id = $1 AND d.state = 'open' AND w.state = 'waiting' AND NOT w.halted AND w.provider <> '' GROUP BY w.provider ORDER BY w.provider

-- name: next_due
-- When the next row is due, of a run that goes on. Runs are looked at only where some row is due, which may be one of a run that is halted.
SELECT extract(epoch FROM CASE WHEN first.due_at > clock_timestamp() THEN first.due_at WHEN first.due_at IS NOT NULL THEN (
    SELECT min(next.due_at) FROM runs r JOIN datasets d USING (run_id) CROSS JOIN LATERAL (
        SELECT w.due_at FROM waits w WHERE w.dataset_seq = d.dataset_seq AND w.state = 'waiting' AND w.due_at IS NOT NULL ORDER BY w.due_at LIMIT 1
    ) next
    WHERE r.state IN ('queued', 'running', 'waiting') AND r.halt_reason IS NULL AND r.stop_reason IS NULL AND r.finished_at IS NULL AND d.state = 'open'
) END - clock_timestamp())::float8 FROM (SELECT min(due_at) AS due_at FROM waits WHERE state = 'waiting') first

-- name: waits_of_page
SELECT * FROM waits WHERE dataset_seq = $1 AND page = $2

-- name: sent_pages
SELECT * FROM pages WHERE dataset_seq = $1 AND page = ANY($2::int[]) ORDER BY page

-- ==== commands =============================================================================================================================

-- name: command
SELECT decision, refused FROM commands WHERE run_id = $1 AND identity = $2

-- name: note_command
INSERT INTO commands (run_id, identity, decision, refused) VALUES ($1, $2, $3, $4)

-- name: resumption
-- The newest decision on a run, if it is a resumption that is not carried out to its end.
SELECT r.decision FROM runs r WHERE r.run_id = $1 AND EXISTS (SELECT FROM commands c WHERE c.run_id = $1 AND c.decision = r.decision)

-- name: carried_out
UPDATE commands SET decision = NULL WHERE run_id = $1 AND decision = $2

-- name: forget_commands
-- Commands of more than $1 seconds ago: no copy of one is under way for so long.
DELETE FROM commands WHERE (run_id, identity) IN (
    SELECT run_id, identity FROM commands WHERE heard_at < now() - make_interval(secs => $1::float8) ORDER BY heard_at LIMIT 1000)

-- ==== retrying =============================================================================================================================

-- name: retry_known
-- Whether a request for a retry was heard before ($3: within so many seconds; null: at any time).
SELECT EXISTS (SELECT FROM retries WHERE run_id = $1 AND identity = $2 AND ($3::float8 IS NULL OR asked_at > now() - make_interval(secs => $3::float8)))

-- name: note_retry
INSERT INTO retries (run_id, identity) VALUES ($1, $2) ON CONFLICT (run_id, identity) DO UPDATE SET asked_at = now()

-- name: forget_retries
-- Requests of more than $1 seconds ago, of runs that are over and that no retry could take up any more, so that a late copy of one makes none.
DELETE FROM retries WHERE (run_id, identity) IN (
    SELECT t.run_id, t.identity FROM retries t
    WHERE t.asked_at < now() - make_interval(secs => $1::float8)
        AND NOT EXISTS (SELECT FROM runs r WHERE r.run_id = t.run_id AND (r.retrying OR r.state IN ('queued', 'running', 'waiting')))
        AND NOT EXISTS (SELECT FROM datasets d WHERE d.run_id = t.run_id
            AND (d.state = 'open' OR d.closed_at >= now() - make_interval(secs => $1::float8)))
    ORDER BY t.asked_at LIMIT 1000)

-- name: begin_retry
-- The newest number of all: what a retry makes of a row stands over what runs made of it that began since. Who halts the run from now on means the
-- retry.
UPDATE runs SET attempt = attempt + 1, number = DEFAULT, retrying = true, halt_reason = NULL, halted_at = NULL,
       halted_seconds = halted_seconds + coalesce(extract(epoch FROM clock_timestamp() - coalesce(halted_at, finished_at))::float8, 0)
WHERE run_id = $1

-- name: note_reopened
-- They are to be open again: still closed, until all is prepared.
UPDATE datasets SET reopened = true WHERE dataset_seq = ANY($1::bigint[])

-- name: too_old_to_retry
-- Whether one of these datasets ended more than $2 seconds ago (what its run could need may be pruned since), or its pages are forgotten.
SELECT EXISTS (SELECT FROM datasets d WHERE d.dataset_seq = ANY($1::bigint[]) AND (d.closed_at < now() - make_interval(secs => $2::float8)
    OR (d.next_page > 0 AND NOT EXISTS (SELECT FROM pages p WHERE p.dataset_seq = d.dataset_seq))))

-- name: reopen_datasets
-- Closed datasets are open again. One whose admission had ended early, or that failed as a whole, is admitted to its end (of which nothing may be left).
UPDATE datasets SET state = 'open', admission_done = admission_done AND error IS NULL, error = NULL, first_error = NULL,
       closed_at = NULL, counted_at = now(), feeder_until = NULL
WHERE dataset_seq = ANY($1::bigint[])

-- name: forget_calls
-- What the body put on record from the first of these datasets' ends on, which are no ends any more.
DELETE FROM recorded_calls c
WHERE c.run_id = $1 AND c.position >= (
    SELECT min(e.position) FROM recorded_calls e WHERE e.run_id = $1 AND e.kind = 'closed' AND e.name = ANY($2::text[]))

-- name: go_on_retrying
-- Or waits for a person, where it was halted while it was prepared.
UPDATE runs SET state = CASE WHEN halt_reason IS NULL OR stop_reason IS NOT NULL THEN 'running' ELSE 'waiting' END, retrying = false,
       waiting_for = CASE WHEN stop_reason IS NULL THEN halt_reason END, halt_reason = CASE WHEN stop_reason IS NULL THEN halt_reason END,
       halted_at = CASE WHEN halt_reason IS NOT NULL AND stop_reason IS NULL THEN clock_timestamp() END, output = 'null', error = NULL, finished_at = NULL,
       code_digest = NULL, lease_until = NULL, advance_wanted = false, advanced_at = now(), advances = 0, changed_at = now()
WHERE run_id = $1

-- name: adopt_dataset
UPDATE datasets SET definition = $2, reopened = false WHERE dataset_seq = $1

-- name: end_retry_waits
UPDATE waits w SET due_at = clock_timestamp()
FROM (
    SELECT o.dataset_seq, o.row_index FROM waits o
    WHERE o.dataset_seq = $1 AND o.state = 'waiting' AND o.due_at IS NULL AND o.reason = $2 ORDER BY o.row_index FOR UPDATE
) retried
WHERE w.dataset_seq = retried.dataset_seq AND w.row_index = retried.row_index

-- name: note_pages_published
-- Their rows are about to be, so the time after which they are published again begins now.
UPDATE pages SET published_at = now(), repetitions = 0 WHERE dataset_seq = $1

-- name: note_code
UPDATE runs SET code_digest = coalesce(code_digest, $2) WHERE run_id = $1

-- ==== the repair look ======================================================================================================================

-- name: datasets_over
-- The closing condition, evaluated anew whatever was told.
SELECT dataset_seq FROM datasets
WHERE state = 'open' AND admission_done AND completed + failed + cancelled + reused + duplicates >= admitted ORDER BY dataset_seq LIMIT 1000

-- name: runs_stopped
-- Stopped runs of which nothing is open, which should have ended.
SELECT run_id FROM runs r WHERE state IN ('queued', 'running', 'waiting') AND stop_reason IS NOT NULL
    AND NOT EXISTS (SELECT FROM datasets d WHERE d.run_id = r.run_id AND d.state = 'open') ORDER BY number LIMIT 1000

-- name: datasets_silent
-- Open datasets of which nothing was heard for $1 seconds, or with pages that are to be published again ($2 seconds, doubling).
SELECT run_id, dataset, dataset_seq FROM datasets d
WHERE state = 'open' AND next_page > 0 AND (
    counted_at < now() - make_interval(secs => $1)
    OR (sent > completed + failed + cancelled AND EXISTS (
        SELECT FROM pages p WHERE p.dataset_seq = d.dataset_seq
            AND p.published_at < now() - make_interval(secs => $2 * 2 ^ least(p.repetitions, 20)))))
ORDER BY counted_at LIMIT 200

-- name: pages_to_send_again
-- Of these open pages those that were published $3 seconds ago, doubling at each repetition.
UPDATE pages SET published_at = now(), repetitions = repetitions + 1
WHERE dataset_seq = $1 AND page = ANY($2::int[]) AND published_at < now() - make_interval(secs => $3 * 2 ^ least(repetitions, 20))
RETURNING page

-- name: forget_closed
-- What closed datasets leave behind that nobody will ask for ($1 seconds after, or $2 where a retry may): their pages' records are the sheet-writer's.
DELETE FROM pages p USING (
    SELECT dataset_seq FROM datasets d WHERE state <> 'open' AND closed_at < now() - make_interval(
            secs => CASE WHEN failed > 0 OR cancelled > 0 OR error IS NOT NULL THEN $2::float8 ELSE $1::float8 END)
        AND EXISTS (SELECT FROM pages o WHERE o.dataset_seq = d.dataset_seq) LIMIT 20
) closed WHERE p.dataset_seq = closed.dataset_seq
