-- Every statement of the receipt-store. Common to all:
--   The database's clock rules leases and freshness. Where it is asked, $1 is added to it (zero but in tests).
--   `x = ANY (ARRAY[y])` says `x = y` in a way that the planner can only probe for: it neither merges nor hashes nor orders by it, which it
--   would do with a table that had one row when it was analysed, and go on doing while the table grows.
--   Arrays are index-aligned, sorted by key, and hold a key once (FACTS.md: else deadlocks and cardinality violations).
--   Locks are taken in one order: rows of `runs` by id, then rows of `receipts` by key. The count over `accounts` makes Postgres lock the
--   first before it touches the second.
--   What a budget pays for is claimed first and confirmed right before it is sent. In between its charge is `unsent`. That only says where to look:
--   whether it is, its receipt says (queued, for that run and dispatch). No sum of it is kept, so that none can be wrong.
--   What changes charges adds the same to the run's row of `tallies` that is the session's own (`tallied`), so that nobody waits for one. A dispatch is
--   tallied as a call, whatever it costs, by its claim (`counted`), and is none any more where it was not sent, or was refused without a charge.
--   Whoever claims or confirms names `runs` in a locking clause, which holds ROW SHARE on the table: halt_run waits for those under way.

-- name: claim
-- Store leases where the row's revision is still the one that was decided on (0: there is no row yet), the run is not halted, the shard's
-- term and the presence hold, its wall time is not over, and what the run would have charged with it (`through_…`: this page up to this claim) is within its
-- budgets. What is not returned was not claimed. The lease that stood before is dealt with in the same commit: `refund` a reservation of another
-- run, `replace` one of the same run and dispatch, `unknown` for a dispatch whose outcome nobody knows. Calls and retries are charged to runs
-- that count them. What is to be confirmed at once is not, where a budget pays for it. Answers the dispatch of what is confirmed, else 0.
-- $2, $3: life of queued and of running leases. $4: every run whose charges change, sorted.
WITH accounts AS MATERIALIZED (
    SELECT
        run_id, state, counts, budget - charged AS money_left, calls_limit - calls AS calls_left, retries_limit - retries AS retries_left,
        coalesce(deadline <= now() + $1::interval, false) AS late,
        budget IS NOT NULL AS pays, calls_limit IS NOT NULL OR retries_limit IS NOT NULL AS pays_by_number
    FROM runs WHERE run_id = ANY ($4::text[]) ORDER BY run_id FOR NO KEY UPDATE
), made AS (
    INSERT INTO receipts AS r (
        key, revision, state, dispatch, lease_id, holder, run_id, caller, org, tool, effect, shard, term, reserved, took_over, expires_at,
        presence, run_term, deaths, alone, counted
    )
    SELECT
        a.key, a.revision + 1, CASE WHEN c.confirm THEN 'running' ELSE 'queued' END, a.dispatch + c.confirm::integer,
        a.lease_id, a.holder, a.run_id, a.caller, a.org, a.tool, a.effect, a.shard, a.term, a.cost::numeric, a.took_over,
        now() + $1::interval + CASE WHEN c.confirm THEN $3::interval ELSE $2::interval END,
        a.presence, a.run_term, a.deaths, false, a.calls + a.retries > 0
    FROM unnest(
        $5::bytea[], $6::bigint[], $7::integer[], $8::boolean[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[],
        $15::text[], $16::integer[], $17::bigint[], $18::text[], $19::boolean[], $20::integer[], $21::integer[], $22::text[], $23::integer[],
        $24::integer[], $32::text[], $33::bigint[], $34::integer[]
    ) AS a (
        key, revision, dispatch, confirm, lease_id, holder, run_id, caller, org, tool, effect, shard, term, cost, took_over, calls, retries,
        through_money, through_calls, through_retries, presence, run_term, deaths
    )
    LEFT JOIN accounts n ON n.run_id = a.run_id
    LEFT JOIN shards s ON s.shard = a.shard
    LEFT JOIN presences p ON p.presence = ANY (ARRAY[a.presence])
    CROSS JOIN LATERAL (
        SELECT a.confirm AND NOT coalesce(n.pays AND a.cost::numeric > 0 OR n.pays_by_number AND a.calls + a.retries > 0, false) AS confirm
    ) AS c
    WHERE (
        n.run_id IS NULL
        OR n.state = 'running' AND NOT n.late
            AND (n.money_left IS NULL OR a.cost::numeric = 0 OR a.through_money::numeric <= n.money_left)
            AND (n.calls_left IS NULL OR a.calls = 0 OR a.through_calls <= n.calls_left)
            AND (n.retries_left IS NULL OR a.retries = 0 OR a.through_retries <= n.retries_left)
    ) AND (a.term IS NULL OR s.term = a.term AND s.holder IS NOT NULL) AND (a.presence IS NULL OR NOT p.ended)
    ORDER BY a.key
    ON CONFLICT (key) DO UPDATE SET
        revision = excluded.revision, state = excluded.state, dispatch = excluded.dispatch, lease_id = excluded.lease_id,
        holder = excluded.holder, run_id = excluded.run_id, caller = excluded.caller, org = excluded.org, tool = excluded.tool,
        effect = excluded.effect, shard = excluded.shard, term = excluded.term, batch_id = '', reserved = excluded.reserved,
        took_over = excluded.took_over, expires_at = excluded.expires_at, presence = excluded.presence, run_term = excluded.run_term,
        deaths = excluded.deaths, alone = false, counted = excluded.counted
    WHERE r.revision = excluded.revision - 1
    RETURNING
        r.key, r.run_id, r.lease_id, r.dispatch, r.state = 'queued' AS unsent, r.reserved, r.dispatch + (r.state = 'queued')::integer AS charged_dispatch,
        r.counted
), reserved AS MATERIALIZED (
    SELECT
        m.run_id, m.key, m.charged_dispatch, m.reserved, m.lease_id, m.unsent,
        CASE WHEN n.counts THEN k.calls ELSE 0 END AS calls, CASE WHEN n.counts THEN k.retries ELSE 0 END AS retries
    FROM made m JOIN unnest($5::bytea[], $20::integer[], $21::integer[]) AS k (key, calls, retries) ON k.key = m.key
    LEFT JOIN accounts n ON n.run_id = m.run_id
    WHERE m.reserved > 0 OR n.counts
), former AS MATERIALIZED (
    SELECT f.*, v.key IS NULL AS nothing_instead
    FROM made JOIN unnest($25::bytea[], $26::text[], $27::integer[], $28::text[], $29::text[], $30::integer[], $31::integer[], $35::boolean[])
        AS f (key, run_id, dispatch, fate, money, calls, retries, counted) ON f.key = made.key
    LEFT JOIN reserved v ON v.key = f.key
), refunded AS (
    DELETE FROM charges c USING former f
    WHERE c.run_id = ANY (ARRAY[f.run_id]) AND c.key = f.key AND c.dispatch = f.dispatch
        AND (f.fate = 'refund' OR f.fate = 'replace' AND f.nothing_instead)
), doubted AS (
    UPDATE charges c SET unknown = true, unsent = false FROM former f
    WHERE c.run_id = ANY (ARRAY[f.run_id]) AND c.key = f.key AND c.dispatch = f.dispatch AND f.fate = 'unknown' AND c.spent IS NULL
), charged AS (
    INSERT INTO charges (run_id, key, dispatch, reserved, lease_id, calls, retries, unsent, claimed_at)
    SELECT run_id, key, charged_dispatch, reserved, lease_id, calls, retries, unsent, now() + $1::interval FROM reserved
    ON CONFLICT (run_id, key, dispatch) DO UPDATE SET
        reserved = excluded.reserved, lease_id = excluded.lease_id, calls = excluded.calls, retries = excluded.retries, unsent = excluded.unsent,
        claimed_at = excluded.claimed_at
), booked AS (
    UPDATE runs SET charged = runs.charged + d.money, calls = runs.calls + d.calls, retries = runs.retries + d.retries
    FROM (
        SELECT run_id, sum(money) AS money, sum(calls) AS calls, sum(retries) AS retries
        FROM (
            SELECT run_id, reserved AS money, calls, retries FROM reserved
            UNION ALL
            SELECT run_id, -money::numeric, -calls, -retries FROM former WHERE fate <> 'unknown'
        ) AS moved
        GROUP BY run_id
    ) AS d
    WHERE runs.run_id = ANY (ARRAY[d.run_id])
), tallied AS (
    INSERT INTO tallies AS t (run_id, session, changes, charged, calls)
    SELECT run_id, pg_backend_pid(), 1, sum(money), sum(calls)
    FROM (
        SELECT run_id, reserved AS money, counted::integer AS calls FROM made
        UNION ALL
        SELECT run_id, -money::numeric, -counted::integer FROM former WHERE fate <> 'unknown'
    ) AS moved
    GROUP BY run_id HAVING sum(money) <> 0 OR sum(calls) <> 0 ORDER BY run_id
    ON CONFLICT (run_id, session) DO UPDATE SET changes = t.changes + 1, charged = t.charged + excluded.charged, calls = t.calls + excluded.calls
)
SELECT key, CASE WHEN unsent THEN 0 ELSE dispatch END AS dispatch FROM made;

-- name: load
-- For each asked key and run: the receipt, if there is one, whether its lease is over, the run's failure, what is known of the run and of the
-- shard that is asked for. Outputs come until together they are over $5 bytes, the first in any case; a negative $5 reads none.
-- OFFSET 0 has a charge found by the whole of its key: in a join that the planner may take apart it was found by run and dispatch, among all charges of
-- its run, by plans that were made while there were few.
-- `open`: what the run's calls under way have reserved: claims of the last $7 that are not confirmed, and those that are for as long as their lease lasts
-- (whoever has it settles the charge, also under a term that is over). A null $7 does not ask. One snapshot: what is left of a budget and what of it may
-- come back are of the same moment.
WITH open AS MATERIALIZED (
    SELECT w.run_id, sum(w.reserved) AS money, sum(w.calls) AS calls, sum(w.retries) AS retries
    FROM charges w JOIN receipts r ON r.key = ANY (ARRAY[w.key])
    WHERE $7::interval IS NOT NULL AND w.spent IS NULL AND NOT w.unknown
        AND (CASE WHEN w.spent IS NULL AND NOT w.unknown THEN w.run_id END) = ANY ($3::text[]) AND r.run_id = w.run_id
        AND (
            r.state = 'queued' AND r.dispatch + 1 = w.dispatch AND w.claimed_at > now() + $1::interval - $7::interval
            OR r.state = 'running' AND r.dispatch = w.dispatch AND r.expires_at > now() + $1::interval
        )
    GROUP BY w.run_id
)
SELECT
    a.key, r.revision, r.state, r.dispatch, r.lease_id, r.run_id, r.tool, r.effect, r.reserved, r.took_over, r.deaths, r.alone, r.counted,
    (
        r.expires_at <= now() + $1::interval
        OR coalesce(r.term <= s.ended_term, false)
        OR r.presence IS NOT NULL AND coalesce(p.ended, true)
        OR r.state = 'queued' AND coalesce(o.state <> 'running' OR o.deadline <= now() + $1::interval, false)
    ) AS over,
    extract(epoch FROM r.expires_at - now() - $1::interval)::float8 AS remaining_seconds,
    CASE
        WHEN $5::bigint < 0 THEN NULL
        WHEN sum(octet_length(r.output)) OVER earlier IS NULL OR sum(octet_length(r.output)) OVER earlier + octet_length(r.output) <= $5::bigint
        THEN r.output
    END AS output,
    CASE WHEN r.state = 'outcome_unknown' THEN r.last_failure END AS last_failure,
    r.no_result, r.cost, extract(epoch FROM r.completed_at)::float8 AS completed_at, extract(epoch FROM r.retired_at)::float8 AS retired_at,
    r.output_dispatch, r.output_run, r.output_caller,
    CASE WHEN coalesce(f.failed_at >= m.retried_at, true) THEN f.failure END AS failure, f.dispatch AS failed_dispatch,
    m.state AS run_state, m.reason AS run_reason, m.budget AS money, m.budget - m.charged AS money_left,
    m.calls_limit, m.calls_limit - m.calls AS calls_left, m.retries_limit, m.retries_limit - m.retries AS retries_left,
    coalesce(u.money, 0) AS open, coalesce(u.calls, 0) AS open_calls, coalesce(u.retries, 0) AS open_retries,
    m.wall_limit, coalesce(m.deadline <= now() + $1::interval, false) AS late,
    coalesce(g.calls, 0) AS held_calls, coalesce(g.retries, 0) AS held_retries,
    coalesce(m.counts, false) AND EXISTS (
        SELECT FROM charges e
        WHERE e.run_id = ANY (ARRAY[a.run_id]) AND e.key = a.key AND e.dispatch <= r.dispatch AND e.calls + e.retries > 0
    ) AS tried,
    t.term AS shard_term, t.holder IS NOT NULL AS shard_held,
    r.run_term, CASE WHEN p.expires_at <= now() + $1::interval THEN r.presence END AS lapsed, NOT q.ended AS present
FROM unnest($2::bytea[], $3::text[], $4::integer[], $6::text[]) AS a (key, run_id, shard, presence)
LEFT JOIN receipts r ON r.key = ANY (ARRAY[a.key])
LEFT JOIN failures f ON f.key = ANY (ARRAY[a.key]) AND f.run_id = a.run_id
LEFT JOIN shards s ON s.shard = r.shard
LEFT JOIN runs o ON o.run_id = ANY (ARRAY[r.run_id])
LEFT JOIN LATERAL (
    SELECT c.calls, c.retries FROM charges c
    WHERE c.run_id = ANY (ARRAY[CASE WHEN r.state IN ('queued', 'running') THEN r.run_id END])
        AND c.key = a.key AND c.dispatch = r.dispatch + (r.state = 'queued')::integer
    OFFSET 0
) g ON true
LEFT JOIN runs m ON m.run_id = ANY (ARRAY[a.run_id])
LEFT JOIN open u ON u.run_id = a.run_id
LEFT JOIN shards t ON t.shard = a.shard
LEFT JOIN presences p ON p.presence = ANY (ARRAY[r.presence])
LEFT JOIN presences q ON q.presence = ANY (ARRAY[a.presence])
WINDOW earlier AS (ORDER BY a.key ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING);

-- name: doubt
-- Running leases that ended without a word, of tools that must not repeat their effect: the outcome is unknown, and the charge stays.
WITH doubted AS (
    UPDATE receipts r SET state = 'outcome_unknown', revision = r.revision + 1, last_failure = NULL
    FROM unnest($1::bytea[], $2::bigint[]) AS a (key, revision)
    WHERE r.key = ANY (ARRAY[a.key]) AND r.revision = a.revision AND r.state = 'running'
    RETURNING r.key, r.run_id, r.dispatch
), kept AS (
    UPDATE charges c SET unknown = true, unsent = false FROM doubted d
    WHERE c.run_id = ANY (ARRAY[d.run_id]) AND c.key = d.key AND c.dispatch = d.dispatch AND c.spent IS NULL
)
SELECT key FROM doubted;

-- name: condemn
-- Running leases that ended without a word, of calls that their gateways die of: they fail for the run that asked for them last ($6) and for the one
-- whose dispatch it was. The charge of that stays, as one of unknown outcome.
WITH condemned AS (
    UPDATE receipts r SET state = 'failed', revision = r.revision + 1, deaths = a.deaths, last_failure = a.failure
    FROM unnest($2::bytea[], $3::bigint[], $4::integer[], $5::bytea[], $6::text[]) AS a (key, revision, deaths, failure, asked_by)
    WHERE r.key = ANY (ARRAY[a.key]) AND r.revision = a.revision AND r.state = 'running'
    RETURNING r.key, r.run_id, a.asked_by, r.dispatch, a.failure
), kept AS (
    INSERT INTO failures (key, run_id, dispatch, failure, failed_at)
    SELECT key, run_id, dispatch, failure, now() + $1::interval FROM condemned
    UNION
    SELECT key, asked_by, dispatch, failure, now() + $1::interval FROM condemned
    ON CONFLICT (key, run_id) DO UPDATE SET dispatch = excluded.dispatch, failure = excluded.failure, failed_at = excluded.failed_at
), charged AS (
    UPDATE charges c SET unknown = true, unsent = false FROM condemned d
    WHERE c.run_id = ANY (ARRAY[d.run_id]) AND c.key = d.key AND c.dispatch = d.dispatch AND c.spent IS NULL
)
SELECT key FROM condemned;

-- name: confirm
-- Queued leases become running under a new dispatch number; one that runs already keeps its number, so a repeat is the same confirmation.
-- A lease that is over but that nobody took is still its holder's, and from now on is bound to the term that confirms it: the end of the term that
-- claimed it does not end it. What it reserved is unsent no more. $2: life of a running lease. `alone`: nothing goes beside it in its gateway; confirmed again
-- without, that is over.
-- $9: the runs, sorted.
WITH accounts AS MATERIALIZED (
    SELECT run_id FROM runs WHERE run_id = ANY ($9::text[]) ORDER BY run_id FOR NO KEY UPDATE
), confirmed AS (
    UPDATE receipts r SET
        state = 'running', revision = r.revision + 1, dispatch = r.dispatch + (r.state = 'queued')::integer, batch_id = a.batch_id,
        shard = CASE WHEN a.term IS NULL THEN r.shard ELSE a.shard END, term = coalesce(a.term, r.term),
        expires_at = now() + $1::interval + $2::interval, alone = a.alone
    FROM unnest($3::bytea[], $4::text[], $5::integer[], $6::bigint[], $7::text[], $8::boolean[])
        AS a (key, lease_id, shard, term, batch_id, alone)
    LEFT JOIN shards s ON s.shard = a.shard
    WHERE (SELECT count(*) FROM accounts) >= 0
        AND r.key = ANY (ARRAY[a.key]) AND r.lease_id = a.lease_id AND r.state IN ('queued', 'running')
        AND (a.term IS NULL OR s.term = a.term AND s.holder IS NOT NULL)
        AND NOT EXISTS (
            SELECT FROM runs h WHERE h.run_id = ANY (ARRAY[r.run_id]) AND (h.state <> 'running' OR h.deadline <= now() + $1::interval)
        )
    RETURNING r.key, r.run_id, r.dispatch
), sent AS (
    UPDATE charges c SET unsent = false FROM confirmed f
    WHERE c.run_id = ANY (ARRAY[f.run_id]) AND c.key = f.key AND c.dispatch = f.dispatch AND c.unsent
)
SELECT key, dispatch FROM confirmed;

-- name: renew
-- Leases still held last a whole life from now, and end with the presence that is named (null: with the one before). $2, $3: life of queued and of
-- running leases.
UPDATE receipts r SET
    revision = r.revision + 1,
    expires_at = now() + $1::interval + CASE r.state WHEN 'queued' THEN $2::interval ELSE $3::interval END,
    presence = coalesce(a.presence, r.presence)
FROM unnest($4::bytea[], $5::text[], $6::text[]) AS a (key, lease_id, presence)
WHERE r.key = ANY (ARRAY[a.key]) AND r.lease_id = a.lease_id AND r.state IN ('queued', 'running')
RETURNING r.key;

-- name: complete
-- Outputs of dispatches whose lease has not moved, whatever the time, also those whose outcome was unknown. Each charge is settled once. A run
-- with a budget of money halts at the first cost above its reservation, and at later ones that pass its budget, for a reason that names the
-- receipt. $2: the runs, sorted.
WITH accounts AS MATERIALIZED (
    SELECT run_id, counts FROM runs WHERE run_id = ANY ($2::text[]) ORDER BY run_id FOR NO KEY UPDATE
), stored AS (
    UPDATE receipts r SET
        state = 'completed', revision = r.revision + 1, took_over = false, deaths = 0, output = a.output, no_result = a.no_result, cost = a.cost::numeric,
        completed_at = now() + $1::interval, retired_at = NULL, output_dispatch = r.dispatch, output_run = r.run_id, output_caller = r.caller
    FROM unnest($3::bytea[], $4::text[], $5::integer[], $6::bytea[], $7::boolean[], $8::text[])
        AS a (key, lease_id, dispatch, output, no_result, cost)
    WHERE (SELECT count(*) FROM accounts) >= 0
        AND r.key = ANY (ARRAY[a.key]) AND r.lease_id = a.lease_id AND r.dispatch = a.dispatch AND r.state IN ('running', 'outcome_unknown')
    RETURNING r.key, r.run_id, r.dispatch, r.reserved, r.cost, r.completed_at
), settled AS (
    INSERT INTO charges AS c (run_id, key, dispatch, reserved, spent, unsent)
    SELECT s.run_id, s.key, s.dispatch, 0, s.cost, false FROM stored s LEFT JOIN accounts n ON n.run_id = s.run_id
    WHERE s.reserved > 0 OR s.cost > 0 OR n.counts
    ON CONFLICT (run_id, key, dispatch) DO UPDATE SET spent = excluded.spent, unknown = false, unsent = false WHERE c.spent IS NULL
    RETURNING c.run_id, c.key, c.spent - c.reserved AS difference, c.spent, c.reserved
), booked AS (
    UPDATE runs SET
        charged = runs.charged + d.difference,
        state = CASE WHEN runs.state = 'running' AND d.above IS NOT NULL AND (NOT runs.exceeded OR runs.charged + d.difference > runs.budget)
            AND runs.budget IS NOT NULL THEN 'halted' ELSE runs.state END,
        reason = CASE WHEN runs.state = 'running' AND d.above IS NOT NULL AND (NOT runs.exceeded OR runs.charged + d.difference > runs.budget)
            AND runs.budget IS NOT NULL THEN 'budget: money, ' || d.above ELSE runs.reason END,
        exceeded = runs.exceeded OR runs.budget IS NOT NULL AND d.above IS NOT NULL
    FROM (
        SELECT
            run_id, sum(difference) AS difference,
            min('receipt ' || left(encode(key, 'hex'), 12) || ' cost ' || spent || ', more than the ' || reserved || ' reserved for it')
                FILTER (WHERE difference > 0) AS above
        FROM settled GROUP BY run_id
    ) AS d
    WHERE runs.run_id = ANY (ARRAY[d.run_id])
), tallied AS (
    INSERT INTO tallies AS t (run_id, session, changes, charged, calls)
    SELECT run_id, pg_backend_pid(), 1, sum(difference), 0 FROM settled GROUP BY run_id HAVING sum(difference) <> 0 ORDER BY run_id
    ON CONFLICT (run_id, session) DO UPDATE SET changes = t.changes + 1, charged = t.charged + excluded.charged
)
SELECT key, extract(epoch FROM completed_at)::float8 AS completed_at FROM stored;

-- name: fail
-- Dispatches that failed, and claims that failed before any (dispatch 0), whose lease has not moved. `becomes`: `failed` is kept for the run,
-- `released` gives the lease back, `outcome_unknown` blocks the key. A charge stays at what was reserved, or is refunded. $2: runs, sorted.
WITH accounts AS MATERIALIZED (
    SELECT run_id FROM runs WHERE run_id = ANY ($2::text[]) ORDER BY run_id FOR NO KEY UPDATE
), failed AS (
    UPDATE receipts r SET
        state = a.becomes, revision = r.revision + 1, last_failure = a.failure, deaths = CASE a.dispatch WHEN 0 THEN r.deaths ELSE 0 END
    FROM unnest($3::bytea[], $4::text[], $5::integer[], $6::text[], $7::bytea[], $8::boolean[])
        AS a (key, lease_id, dispatch, becomes, failure, refund)
    WHERE (SELECT count(*) FROM accounts) >= 0
        AND r.key = ANY (ARRAY[a.key]) AND r.lease_id = a.lease_id
        AND (
            r.state IN ('running', 'outcome_unknown') AND r.dispatch = a.dispatch
            OR r.state = 'queued' AND a.dispatch = 0
        )
    RETURNING
        r.key, r.run_id, r.state, r.dispatch, a.failure, a.refund OR a.dispatch = 0 AS refund, r.counted,
        CASE a.dispatch WHEN 0 THEN r.dispatch + 1 ELSE a.dispatch END AS charged_dispatch
), kept AS (
    INSERT INTO failures (key, run_id, dispatch, failure, failed_at)
    SELECT key, run_id, dispatch, failure, now() + $1::interval FROM failed WHERE state = 'failed'
    ON CONFLICT (key, run_id) DO UPDATE SET dispatch = excluded.dispatch, failure = excluded.failure, failed_at = excluded.failed_at
), settled AS (
    UPDATE charges c SET
        spent = CASE WHEN f.state = 'outcome_unknown' THEN NULL ELSE c.reserved END, unknown = f.state = 'outcome_unknown', unsent = false
    FROM failed f
    WHERE c.run_id = ANY (ARRAY[f.run_id]) AND c.key = f.key AND c.dispatch = f.charged_dispatch AND c.spent IS NULL AND NOT f.refund
), refunded AS (
    DELETE FROM charges c USING failed f
    WHERE c.run_id = ANY (ARRAY[f.run_id]) AND c.key = f.key AND c.dispatch = f.charged_dispatch AND c.spent IS NULL AND f.refund
    RETURNING c.run_id, c.reserved, c.calls, c.retries
), booked AS (
    UPDATE runs SET
        charged = runs.charged - d.money, calls = runs.calls - d.calls, retries = runs.retries - d.retries
    FROM (SELECT run_id, sum(reserved) AS money, sum(calls) AS calls, sum(retries) AS retries FROM refunded GROUP BY run_id) AS d
    WHERE runs.run_id = ANY (ARRAY[d.run_id])
), tallied AS (
    INSERT INTO tallies AS t (run_id, session, changes, charged, calls)
    SELECT run_id, pg_backend_pid(), 1, sum(money), sum(calls)
    FROM (
        SELECT run_id, -reserved AS money, 0 AS calls FROM refunded UNION ALL SELECT run_id, 0, -1 FROM failed WHERE refund AND counted
    ) AS moved
    GROUP BY run_id ORDER BY run_id
    ON CONFLICT (run_id, session) DO UPDATE SET changes = t.changes + 1, charged = t.charged + excluded.charged, calls = t.calls + excluded.calls
)
SELECT key FROM failed;

-- name: give_up
-- Calls that failed with nothing claimed for them: kept for their runs. Leases stand, and an output serves all the same. There
-- must be a receipt, since claims of a key without one are granted unread; a new revision lets claims under way be decided anew.
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($2::bytea[], $3::text[], $4::bytea[], $5::text[], $6::text[], $7::text[], $8::text[])
        AS a (key, run_id, failure, caller, org, tool, effect)
), known AS (
    INSERT INTO receipts AS r (
        key, revision, state, dispatch, lease_id, holder, run_id, caller, org, tool, effect, reserved, took_over, expires_at, last_failure
    )
    SELECT key, 1, 'failed', 0, '', '', run_id, caller, org, tool, effect, 0, false, now() + $1::interval, failure FROM asked ORDER BY key
    ON CONFLICT (key) DO UPDATE SET revision = r.revision + 1
)
INSERT INTO failures (key, run_id, dispatch, failure, failed_at)
SELECT key, run_id, 0, failure, now() + $1::interval FROM asked ORDER BY key
ON CONFLICT (key, run_id) DO UPDATE SET failure = excluded.failure, failed_at = excluded.failed_at;

-- name: release
-- Claims that were never sent. Dispatch 0: nothing ever went under this lease, whether or not it was confirmed meanwhile (a confirmation whose
-- answer was lost); else that dispatch did not. Also where the outcome was taken for unknown meanwhile. What they reserved is refunded, even
-- after the lease has moved. $1: the runs, sorted.
WITH accounts AS MATERIALIZED (
    SELECT run_id FROM runs WHERE run_id = ANY ($1::text[]) ORDER BY run_id FOR NO KEY UPDATE
), asked AS MATERIALIZED (
    SELECT g.* FROM unnest($2::bytea[], $3::text[], $4::integer[], $5::text[]) AS g (key, lease_id, dispatch, run_id)
    WHERE (SELECT count(*) FROM accounts) >= 0
), given_back AS (
    UPDATE receipts r SET state = 'released', revision = r.revision + 1
    FROM asked a
    WHERE r.key = ANY (ARRAY[a.key]) AND r.lease_id = a.lease_id
        AND (
            a.dispatch = 0 AND r.state IN ('queued', 'running', 'outcome_unknown')
            OR r.dispatch = a.dispatch AND r.state IN ('running', 'outcome_unknown')
        )
    RETURNING r.key, r.run_id, r.counted
), refunded AS (
    DELETE FROM charges c USING asked a
    WHERE c.run_id = ANY (ARRAY[a.run_id]) AND c.key = a.key AND c.spent IS NULL
        AND CASE a.dispatch WHEN 0 THEN c.lease_id = a.lease_id ELSE c.dispatch = a.dispatch END
    RETURNING c.key, c.run_id, c.reserved, c.calls, c.retries
), booked AS (
    UPDATE runs SET
        charged = runs.charged - d.money, calls = runs.calls - d.calls, retries = runs.retries - d.retries
    FROM (SELECT run_id, sum(reserved) AS money, sum(calls) AS calls, sum(retries) AS retries FROM refunded GROUP BY run_id) AS d
    WHERE runs.run_id = ANY (ARRAY[d.run_id])
), tallied AS (
    INSERT INTO tallies AS t (run_id, session, changes, charged, calls)
    SELECT run_id, pg_backend_pid(), 1, sum(money), sum(calls)
    FROM (
        SELECT run_id, 0 AS money, -1 AS calls FROM given_back WHERE counted
        UNION ALL
        SELECT c.run_id, -c.reserved, CASE WHEN g.key IS NULL AND c.reserved + c.calls + c.retries > 0 THEN -1 ELSE 0 END
        FROM refunded c LEFT JOIN given_back g ON g.key = c.key
    ) AS moved
    GROUP BY run_id ORDER BY run_id
    ON CONFLICT (run_id, session) DO UPDATE SET changes = t.changes + 1, charged = t.charged + excluded.charged, calls = t.calls + excluded.calls
)
SELECT key FROM given_back;

-- name: sweep
-- At most $3 of the claims that reserve something and have been over for $2: each is released and its reservation refunded. What others have in hand is
-- left for the next look. Charges that are said to be unsent are read all; the condition on the run has them found by their own index, and what else is
-- asked of them is asked apart from it (OFFSET 0), or they are looked for among those that are under way.
WITH said AS MATERIALIZED (
    SELECT run_id, key, dispatch
    FROM (
        SELECT run_id, key, dispatch, spent, unknown FROM charges WHERE unsent AND (CASE WHEN unsent THEN run_id END) >= '' OFFSET 0
    ) AS c
    WHERE spent IS NULL AND NOT unknown
), over AS MATERIALIZED (
    SELECT c.run_id, c.key, c.dispatch FROM said c JOIN receipts r ON r.key = ANY (ARRAY[c.key])
    WHERE r.state = 'queued' AND r.run_id = c.run_id AND r.dispatch + 1 = c.dispatch AND r.expires_at <= now() + $1::interval - $2::interval
    ORDER BY c.run_id, c.key LIMIT $3::integer
), accounts AS MATERIALIZED (
    SELECT run_id FROM runs WHERE run_id IN (SELECT run_id FROM over) ORDER BY run_id FOR NO KEY UPDATE
), free AS MATERIALIZED (
    SELECT r.key, o.run_id, o.dispatch FROM over o JOIN receipts r ON r.key = ANY (ARRAY[o.key])
    WHERE (SELECT count(*) FROM accounts) >= 0 AND r.state = 'queued' AND r.run_id = o.run_id AND r.dispatch + 1 = o.dispatch
        AND r.expires_at <= now() + $1::interval - $2::interval
    ORDER BY r.key FOR UPDATE OF r SKIP LOCKED
), released AS (
    UPDATE receipts r SET state = 'released', revision = r.revision + 1 FROM free f WHERE r.key = ANY (ARRAY[f.key])
    RETURNING f.run_id, f.key, f.dispatch, r.counted
), refunded AS (
    DELETE FROM charges c USING released l WHERE c.run_id = l.run_id AND c.key = l.key AND c.dispatch = l.dispatch AND c.spent IS NULL
    RETURNING c.run_id, c.reserved, c.calls, c.retries
), booked AS (
    UPDATE runs SET
        charged = runs.charged - d.money, calls = runs.calls - d.calls, retries = runs.retries - d.retries
    FROM (SELECT run_id, sum(reserved) AS money, sum(calls) AS calls, sum(retries) AS retries FROM refunded GROUP BY run_id) AS d
    WHERE runs.run_id = d.run_id
), tallied AS (
    INSERT INTO tallies AS t (run_id, session, changes, charged, calls)
    SELECT run_id, pg_backend_pid(), 1, sum(money), sum(calls)
    FROM (
        SELECT run_id, -reserved AS money, 0 AS calls FROM refunded UNION ALL SELECT run_id, 0, -1 FROM released WHERE counted
    ) AS moved
    GROUP BY run_id ORDER BY run_id
    ON CONFLICT (run_id, session) DO UPDATE SET changes = t.changes + 1, charged = t.charged + excluded.charged, calls = t.calls + excluded.calls
)
SELECT count(*) FROM released;

-- name: correct_unsent
-- Of the charges that are said to be unsent since more than $2, at most $3 that no claim holds are so no more: processes of before that word neither read
-- nor move it. What others have in hand is left for the next look.
WITH stale AS MATERIALIZED (
    SELECT c.run_id, c.key, c.dispatch FROM charges c LEFT JOIN receipts r ON r.key = ANY (ARRAY[c.key])
    WHERE c.unsent AND (CASE WHEN c.unsent THEN c.run_id END) >= '' AND c.claimed_at <= now() + $1::interval - $2::interval
        AND NOT coalesce(r.state = 'queued' AND r.run_id = c.run_id AND r.dispatch + 1 = c.dispatch, false)
    LIMIT $3::integer FOR UPDATE OF c SKIP LOCKED
), corrected AS (
    UPDATE charges c SET unsent = false FROM stale s WHERE c.run_id = s.run_id AND c.key = s.key AND c.dispatch = s.dispatch
    RETURNING c.key
)
SELECT count(*) FROM corrected;

-- name: settle_charges
-- What a dispatch cost whose lease has moved on: its output or failure is no longer wanted, its charge is. `spent` null: what was reserved;
-- `refund`: nothing was sent after all. Settled once, like any charge. $1: the runs, sorted.
WITH accounts AS MATERIALIZED (
    SELECT run_id FROM runs WHERE run_id = ANY ($1::text[]) ORDER BY run_id FOR NO KEY UPDATE
), asked AS MATERIALIZED (
    SELECT run_id, key, dispatch, spent::numeric AS spent, refund
    FROM unnest($2::text[], $3::bytea[], $4::integer[], $5::text[], $6::boolean[]) AS a (run_id, key, dispatch, spent, refund)
    WHERE (SELECT count(*) FROM accounts) >= 0
), refunded AS (
    DELETE FROM charges c USING asked a
    WHERE c.run_id = ANY (ARRAY[a.run_id]) AND c.key = a.key AND c.dispatch = a.dispatch AND c.spent IS NULL AND a.refund
    RETURNING c.run_id, c.key, -c.reserved AS difference, c.spent, c.reserved, c.calls, c.retries
), kept AS (
    UPDATE charges c SET spent = c.reserved, unknown = false, unsent = false FROM asked a
    WHERE c.run_id = ANY (ARRAY[a.run_id]) AND c.key = a.key AND c.dispatch = a.dispatch AND c.spent IS NULL AND NOT a.refund AND a.spent IS NULL
), settled AS (
    INSERT INTO charges AS c (run_id, key, dispatch, reserved, spent, unsent)
    SELECT a.run_id, a.key, a.dispatch, 0, a.spent, false
    FROM asked a
    WHERE NOT a.refund AND a.spent IS NOT NULL
        AND (a.spent > 0 OR EXISTS (SELECT FROM charges e WHERE e.run_id = ANY (ARRAY[a.run_id]) AND e.key = a.key AND e.dispatch = a.dispatch))
    ORDER BY a.key
    ON CONFLICT (run_id, key, dispatch) DO UPDATE SET spent = excluded.spent, unknown = false, unsent = false WHERE c.spent IS NULL
    RETURNING c.run_id, c.key, c.spent - c.reserved AS difference, c.spent, c.reserved, 0 AS calls, 0 AS retries
), booked AS (
    UPDATE runs SET
        charged = runs.charged + d.difference,
        calls = runs.calls - d.calls,
        retries = runs.retries - d.retries,
        state = CASE WHEN runs.state = 'running' AND d.above IS NOT NULL AND (NOT runs.exceeded OR runs.charged + d.difference > runs.budget)
            AND runs.budget IS NOT NULL THEN 'halted' ELSE runs.state END,
        reason = CASE WHEN runs.state = 'running' AND d.above IS NOT NULL AND (NOT runs.exceeded OR runs.charged + d.difference > runs.budget)
            AND runs.budget IS NOT NULL THEN 'budget: money, ' || d.above ELSE runs.reason END,
        exceeded = runs.exceeded OR runs.budget IS NOT NULL AND d.above IS NOT NULL
    FROM (
        SELECT
            run_id, sum(difference) AS difference, sum(calls) AS calls, sum(retries) AS retries,
            min('receipt ' || left(encode(key, 'hex'), 12) || ' cost ' || spent || ', more than the ' || reserved || ' reserved for it')
                FILTER (WHERE difference > 0) AS above
        FROM (SELECT * FROM refunded UNION ALL SELECT * FROM settled) AS moved GROUP BY run_id
    ) AS d
    WHERE runs.run_id = ANY (ARRAY[d.run_id])
    RETURNING runs.run_id
), tallied AS (
    INSERT INTO tallies AS t (run_id, session, changes, charged, calls)
    SELECT run_id, pg_backend_pid(), 1, sum(difference), sum(uncounted)
    FROM (
        SELECT run_id, difference, CASE WHEN reserved + calls + retries > 0 THEN -1 ELSE 0 END AS uncounted FROM refunded
        UNION ALL
        SELECT run_id, difference, 0 FROM settled
    ) AS moved
    GROUP BY run_id HAVING sum(difference) <> 0 OR sum(uncounted) <> 0 ORDER BY run_id
    ON CONFLICT (run_id, session) DO UPDATE SET changes = t.changes + 1, charged = t.charged + excluded.charged, calls = t.calls + excluded.calls
)
SELECT count(*) FROM booked;

-- name: lease_shards
-- Take shards that are free or given up, renew those that the holder has, and take those whose lease has lapsed and whose holder did not come
-- back although others have asked for the shard for $3. A silence of more than half of that counts for a quarter: while nobody was served, the
-- holder could not renew either, but who asks seldom gets there, too. The term rises at each change of hands; taking a lapsed shard ends the
-- leases of its former terms.
-- $2: life of a shard lease.
INSERT INTO shards AS s (shard, term, holder, expires_at, ended_term)
SELECT shard, 1, $4::text, now() + $1::interval + $2::interval, 0 FROM unnest($5::integer[]) AS shard ORDER BY shard
ON CONFLICT (shard) DO UPDATE SET (term, holder, expires_at, ended_term, contested_since, contested_at) = (
    SELECT
        CASE WHEN k.changes THEN s.term + 1 ELSE s.term END,
        CASE WHEN k.gets THEN excluded.holder ELSE s.holder END,
        CASE WHEN k.gets THEN excluded.expires_at ELSE s.expires_at END,
        CASE WHEN k.changes AND s.holder IS NOT NULL THEN s.term ELSE s.ended_term END,
        CASE WHEN NOT k.gets THEN k.since END,
        CASE WHEN NOT k.gets THEN k.at END
    FROM (
        SELECT
            c.since, c.at, s.holder IS DISTINCT FROM excluded.holder AND c.ends AS changes, c.ends OR s.holder = excluded.holder AS gets
        FROM (
            SELECT w.since, w.at, s.holder IS NULL OR s.expires_at <= w.at AND w.since <= w.at - $3::interval AS ends
            FROM (
                SELECT
                    now() + $1::interval AS at,
                    CASE
                        WHEN s.contested_at IS NULL THEN now() + $1::interval
                        WHEN s.contested_at >= now() + $1::interval - $3::interval / 2 THEN s.contested_since
                        ELSE s.contested_since + (now() + $1::interval - s.contested_at - $3::interval / 4)
                    END AS since
            ) AS w
        ) AS c
    ) AS k
)
RETURNING shard, term, holder = $4::text AS held, greatest(0, extract(epoch FROM expires_at - now() - $1::interval))::float8 AS seconds;

-- name: release_shards
-- Give shards up: nobody holds them, and nothing more is claimed or confirmed under their term. What $2 holds under another term than the one that
-- is named (0: none is) it has taken since, and keeps.
UPDATE shards SET holder = NULL, expires_at = now() + $1::interval
WHERE shard IN (
    SELECT s.shard FROM unnest($3::integer[], $4::bigint[]) AS a (shard, term) JOIN shards s ON s.shard = ANY (ARRAY[a.shard])
    WHERE s.holder = $2::text AND (a.term = 0 OR s.term = a.term) ORDER BY s.shard FOR NO KEY UPDATE OF s
)
RETURNING shard;

-- name: keep_presence
-- The process is there for $2 from now on; nothing is returned where it was taken for dead, and stays so.
INSERT INTO presences AS p (presence, expires_at) VALUES ($3::text, now() + $1::interval + $2::interval)
ON CONFLICT (presence) DO UPDATE SET expires_at = excluded.expires_at, contested_since = NULL, contested_at = NULL WHERE NOT p.ended
RETURNING xmax = 0 AS new;

-- name: leave_presence
-- The process goes: its leases are over, and so is what it said before that comes only now.
INSERT INTO presences (presence, expires_at, ended) VALUES ($2::text, now() + $1::interval, true)
ON CONFLICT (presence) DO UPDATE SET ended = true;

-- name: end_presences
-- Others ask for leases of processes that did not say in time that they are there. After an outage who was away comes back in any order: such a
-- presence ends only if it is asked for during $2 without a word of its process. A silence of more than half of that counts for a quarter, as with shards.
UPDATE presences p SET
    ended = w.since <= w.at - $2::interval, contested_since = w.since, contested_at = w.at
FROM (
    SELECT
        c.presence, now() + $1::interval AS at,
        CASE
            WHEN c.contested_at IS NULL THEN now() + $1::interval
            WHEN c.contested_at >= now() + $1::interval - $2::interval / 2 THEN c.contested_since
            ELSE c.contested_since + (now() + $1::interval - c.contested_at - $2::interval / 4)
        END AS since
    FROM presences c WHERE c.presence = ANY ($3::text[]) AND NOT c.ended AND c.expires_at <= now() + $1::interval
    ORDER BY c.presence FOR UPDATE
) AS w
WHERE p.presence = ANY (ARRAY[w.presence])
RETURNING p.presence, p.ended;

-- name: forget_presences
-- Of processes that are long gone: their leases are over by their own time.
DELETE FROM presences WHERE expires_at <= now() + $1::interval - interval '1 day';

-- name: meet_gateways
-- $3 is there for $2 from now on, and says of itself what its newest request ($4) does; who is there besides, by name. `shares`: it serves and has been
-- there for $2. Whom nobody has heard of for long is forgotten.
WITH gone AS (
    DELETE FROM gateways WHERE holder IN (
        SELECT holder FROM gateways
        WHERE holder <> $3::text AND expires_at <= now() + $1::interval - 100 * $2::interval FOR UPDATE SKIP LOCKED
    )
), here AS (
    INSERT INTO gateways AS g (holder, number, joined_at, expires_at, serving, open)
    VALUES ($3::text, $4::bigint, now() + $1::interval, now() + $1::interval + $2::interval, $5::boolean, $6::bytea)
    ON CONFLICT (holder) DO UPDATE SET
        number = excluded.number, expires_at = excluded.expires_at, serving = g.serving AND excluded.serving, open = excluded.open
    WHERE g.number <= excluded.number
    RETURNING holder, joined_at, serving, open
)
SELECT f.holder, f.serving AND f.joined_at <= now() + $1::interval - $2::interval AS shares, f.open
FROM (
    SELECT holder, joined_at, serving, open FROM here
    UNION ALL
    SELECT holder, joined_at, serving, open FROM gateways WHERE holder <> $3::text AND expires_at > now() + $1::interval
) AS f
ORDER BY f.holder;

-- name: windows
-- What is stored of the asked windows, and how long ago it was.
SELECT name, term, number, sent, permits, seconds, extract(epoch FROM now() + $1::interval - reported_at)::float8 AS elapsed
FROM windows WHERE name = ANY ($2::text[]);

-- name: report_windows
-- Store what was sent and drawn, where the shard is still held by $2 under the term that is named and nothing newer is stored.
INSERT INTO windows AS w (name, term, number, reported_at, sent, permits, seconds)
SELECT a.name, a.term, a.number, now() + $1::interval, a.sent, a.permits, a.seconds
FROM unnest($3::text[], $4::integer[], $5::bigint[], $6::bigint[], $7::bytea[], $8::integer[], $9::float8[])
    AS a (name, shard, term, number, sent, permits, seconds)
JOIN shards s ON s.shard = a.shard AND s.term = a.term AND s.holder = $2::text
ON CONFLICT (name) DO UPDATE SET
    term = excluded.term, number = excluded.number, reported_at = excluded.reported_at, sent = excluded.sent, permits = excluded.permits,
    seconds = excluded.seconds
WHERE (w.term, w.number) < (excluded.term, excluded.number)
RETURNING name;

-- name: standings
-- What is known of the lanes of each shard that is named, as its holders before this term said last; those that stay closed for longest first, as many as
-- fit a message. What was said long ago and is over is forgotten.
WITH gone AS (
    DELETE FROM standings WHERE (shard, lane) IN (
        SELECT s.shard, s.lane FROM unnest($2::integer[]) AS a (shard) JOIN standings s ON s.shard = ANY (ARRAY[a.shard])
        WHERE s.told_at <= now() + $1::interval - interval '1 day' AND s.closed_until <= now() + $1::interval FOR UPDATE OF s SKIP LOCKED
    )
)
SELECT
    s.shard, s.lane, greatest(0, extract(epoch FROM s.closed_until - now() - $1::interval))::float8 AS closed, s.share, s.missed,
    extract(epoch FROM now() + $1::interval - s.away_since)::float8 AS away
FROM unnest($2::integer[], $3::bigint[]) AS a (shard, term) JOIN standings s ON s.shard = ANY (ARRAY[a.shard]) AND s.term < a.term
ORDER BY s.closed_until DESC, s.shard, s.lane LIMIT 5000;

-- name: tell_standings
-- Keep what is known of lanes, where the shard is still held by $2 under the term that is named and nothing newer is stored. The lock has whoever takes the
-- shard wait, and then read it. No closing is longer than a year, which an interval can carry.
INSERT INTO standings AS s (shard, lane, term, number, told_at, closed_until, share, missed, away_since)
SELECT
    a.shard, a.lane, a.term, $3::bigint, now() + $1::interval, now() + $1::interval + least(a.closed, 31536000) * interval '1 second', a.share, a.missed,
    CASE WHEN a.away IS NOT NULL THEN now() + $1::interval - least(a.away, 31536000) * interval '1 second' END
FROM unnest($4::integer[], $5::text[], $6::bigint[], $7::float8[], $8::float8[], $9::integer[], $10::float8[])
    AS a (shard, lane, term, closed, share, missed, away)
JOIN shards h ON h.shard = a.shard AND h.term = a.term AND h.holder = $2::text
ORDER BY a.shard, a.lane FOR SHARE OF h
ON CONFLICT (shard, lane) DO UPDATE SET
    term = excluded.term, number = excluded.number, told_at = excluded.told_at, closed_until = excluded.closed_until, share = excluded.share,
    missed = excluded.missed, away_since = excluded.away_since
WHERE (s.term, s.number) < (excluded.term, excluded.number);

-- name: bar_claims
-- Wait for the claims, confirmations and settlements under way, and let none begin before our commit: what is stored after it sees the run
-- as it then stands. Reading (backups) goes on.
LOCK TABLE runs IN EXCLUSIVE MODE;

-- name: halt_run
-- Stop, halt or resume a run, whether or not it is known. $5: the number of the decision; one that is not newer than that which the run stands under
-- changes nothing, but for a stop, which stands whatever else was decided. $4, $6 to $9: the budgets (money, calls, retries, wall time and when it is
-- over); of an unnumbered decision (0) null leaves them as they are. $10: failures of before count no more; $11 is added to the clock.
INSERT INTO runs AS r (
    run_id, state, reason, budget, charged, decision, calls_limit, calls, retries_limit, retries, counts, wall_limit, deadline, retried_at
)
SELECT
    $1::text, $2::text, $3::text, $4::numeric, coalesce(sum(coalesce(c.spent, c.reserved)), 0), $5::bigint, $6::bigint, coalesce(sum(c.calls), 0),
    $7::bigint, coalesce(sum(c.retries), 0), $6::bigint IS NOT NULL OR $7::bigint IS NOT NULL, $8::float8, to_timestamp($9::float8),
    CASE WHEN $10::boolean THEN clock_timestamp() + $11::interval END
FROM charges c WHERE c.run_id = $1::text
ON CONFLICT (run_id) DO UPDATE SET
    state = CASE
        WHEN 'stopped' IN (r.state, excluded.state) THEN 'stopped'
        WHEN excluded.decision > r.decision OR r.decision = 0 THEN excluded.state
        ELSE r.state
    END,
    reason = CASE
        WHEN r.state = 'stopped' THEN r.reason
        WHEN excluded.state = 'stopped' OR excluded.decision > r.decision OR r.decision = 0 THEN excluded.reason
        ELSE r.reason
    END,
    budget = CASE
        WHEN excluded.decision > r.decision THEN excluded.budget
        WHEN r.decision = 0 THEN coalesce(excluded.budget, r.budget)
        ELSE r.budget
    END,
    calls_limit = CASE
        WHEN excluded.decision > r.decision THEN excluded.calls_limit
        WHEN r.decision = 0 THEN coalesce(excluded.calls_limit, r.calls_limit)
        ELSE r.calls_limit
    END,
    retries_limit = CASE
        WHEN excluded.decision > r.decision THEN excluded.retries_limit
        WHEN r.decision = 0 THEN coalesce(excluded.retries_limit, r.retries_limit)
        ELSE r.retries_limit
    END,
    wall_limit = CASE
        WHEN excluded.decision > r.decision THEN excluded.wall_limit
        WHEN r.decision = 0 THEN coalesce(excluded.wall_limit, r.wall_limit)
        ELSE r.wall_limit
    END,
    deadline = CASE
        WHEN excluded.decision > r.decision THEN excluded.deadline
        WHEN r.decision = 0 THEN coalesce(excluded.deadline, r.deadline)
        ELSE r.deadline
    END,
    retried_at = CASE WHEN excluded.decision > r.decision OR r.decision = 0 THEN coalesce(excluded.retried_at, r.retried_at) ELSE r.retried_at END,
    counts = r.counts OR excluded.counts,
    decision = greatest(r.decision, excluded.decision)
RETURNING state, reason, decision;

-- name: tallies
-- What each of these runs was charged so far: of a dispatch what it cost, or what is reserved for it while that is not known. `version` rises with
-- every change. Runs that were charged nothing are left out. `counted_`: what budgets of calls and retries paid for, null where there never was one.
SELECT
    t.run_id, sum(t.changes)::bigint AS version, sum(t.charged) AS charged, sum(t.calls)::bigint AS calls,
    r.calls AS counted_calls, r.retries AS counted_retries
FROM unnest($1::text[]) AS a (run_id) JOIN tallies t ON t.run_id = ANY (ARRAY[a.run_id])
LEFT JOIN runs r ON r.run_id = ANY (ARRAY[a.run_id]) AND r.counts
GROUP BY t.run_id, r.calls, r.retries;

-- name: receipts_named
-- What an operator sees of receipts with keys from $1 to $2, at most three: enough to say that a name fits several.
SELECT
    key, state, tool, effect, org, run_id, caller, dispatch, holder, batch_id, lease_id, reserved, cost, last_failure, output, deaths,
    extract(epoch FROM expires_at - now())::float8 AS lease_seconds, extract(epoch FROM completed_at)::float8 AS completed_at,
    octet_length(output) AS output_bytes
FROM receipts WHERE key BETWEEN $1::bytea AND $2::bytea ORDER BY key LIMIT 3;

-- name: walk_in_order
-- For the statements below, until their transaction ends: they walk the primary key, which the pinned plans would not.
SELECT set_config('enable_indexscan', 'on', true), set_config('plan_cache_mode', 'force_custom_plan', true);

-- name: list_receipts
-- Receipts after key $1, in the order of keys, of a state, run and tool where these are not null.
SELECT
    key, state, tool, effect, org, run_id, caller, dispatch, holder, batch_id, reserved, cost, last_failure, deaths,
    extract(epoch FROM expires_at - now())::float8 AS lease_seconds, extract(epoch FROM completed_at)::float8 AS completed_at,
    octet_length(output) AS output_bytes
FROM receipts
WHERE key > $1::bytea AND ($2::text IS NULL OR state = $2) AND ($3::text IS NULL OR run_id = $3) AND ($4::text IS NULL OR tool = $4)
ORDER BY key LIMIT $5::integer;

-- name: retire
-- Take outputs of before $2 seconds ago out of use, among the $3 receipts after key $1: they serve no run that starts from now on.
WITH page AS MATERIALIZED (
    SELECT key FROM receipts WHERE key > $1::bytea ORDER BY key LIMIT $3::integer
), old AS MATERIALIZED (
    SELECT r.key FROM page p JOIN receipts r ON r.key = ANY (ARRAY[p.key])
    WHERE r.retired_at IS NULL AND r.state IN ('completed', 'failed', 'released') AND r.completed_at < now() - make_interval(secs => $2::float8)
    ORDER BY r.key FOR UPDATE OF r
), retired AS (
    UPDATE receipts r SET retired_at = now() FROM old o WHERE r.key = ANY (ARRAY[o.key]) RETURNING r.key
)
SELECT
    (SELECT count(*) FROM retired) AS retired, extract(epoch FROM now())::float8 AS at,
    (SELECT CASE WHEN count(*) = $3::integer THEN (SELECT key FROM page ORDER BY key DESC LIMIT 1) END FROM page) AS last;

-- name: prunable
-- What `prune` would forget of the $3 receipts after key $1, once `retire` was done.
WITH page AS MATERIALIZED (
    SELECT key, state, expires_at, completed_at, coalesce(retired_at, now()) AS retired_at, octet_length(output) AS bytes
    FROM receipts WHERE key > $1::bytea ORDER BY key LIMIT $3::integer
), doomed AS (
    SELECT key, state, bytes FROM page
    WHERE state IN ('completed', 'failed', 'released')
        AND CASE state WHEN 'completed' THEN completed_at ELSE greatest(expires_at, completed_at) END < now() - make_interval(secs => $2::float8)
        AND (completed_at IS NULL OR retired_at <= to_timestamp($4::float8))
        AND (state = 'completed' OR greatest(expires_at, completed_at) < to_timestamp($4::float8))
), failed AS (
    SELECT f.key FROM page p JOIN failures f ON f.key = ANY (ARRAY[p.key])
    WHERE f.failed_at < least(now() - make_interval(secs => $2::float8), to_timestamp($4::float8))
)
SELECT
    (SELECT count(*) FROM doomed WHERE state = 'completed') AS completed, (SELECT count(*) FROM doomed WHERE state <> 'completed') AS ended,
    (SELECT count(*) FROM failed) AS failures, (SELECT coalesce(sum(bytes), 0) FROM doomed)::bigint AS bytes,
    (SELECT CASE WHEN count(*) = $3::integer THEN (SELECT key FROM page ORDER BY key DESC LIMIT 1) END FROM page) AS last;

-- name: prune
-- Forget the receipts among the $3 after key $1 that ended more than $2 seconds ago, and such failures: no lease, no unknown outcome, and nothing
-- that a run could need which is not over. $4: when the oldest of these started. An output may serve runs that started before it was retired; what
-- ended without one, and failures, concern the runs of that time alone. A key that is forgotten begins anew with its dispatch numbers, so its
-- payer's charges move to one that belongs to no receipt, and the run's sum stays.
WITH page AS MATERIALIZED (
    SELECT key FROM receipts WHERE key > $1::bytea ORDER BY key LIMIT $3::integer
), doomed AS MATERIALIZED (
    SELECT r.key FROM page p JOIN receipts r ON r.key = ANY (ARRAY[p.key])
    WHERE r.state IN ('completed', 'failed', 'released')
        AND CASE r.state WHEN 'completed' THEN r.completed_at ELSE greatest(r.expires_at, r.completed_at) END < now() - make_interval(secs => $2::float8)
        AND (r.completed_at IS NULL OR r.retired_at <= to_timestamp($4::float8))
        AND (r.state = 'completed' OR greatest(r.expires_at, r.completed_at) < to_timestamp($4::float8))
    ORDER BY r.key FOR UPDATE OF r
), gone AS (
    DELETE FROM receipts r USING doomed d WHERE r.key = ANY (ARRAY[d.key])
    RETURNING r.key, r.state, octet_length(r.output) AS bytes, r.run_id, r.output_run
), failed AS (
    DELETE FROM failures f USING page p
    WHERE f.key = ANY (ARRAY[p.key]) AND f.failed_at < least(now() - make_interval(secs => $2::float8), to_timestamp($4::float8))
    RETURNING f.key
), payers AS (
    SELECT key, run_id FROM gone UNION SELECT key, output_run FROM gone WHERE output_run IS NOT NULL
), moved AS (
    DELETE FROM charges c USING payers p WHERE c.run_id = ANY (ARRAY[p.run_id]) AND c.key = p.key
    RETURNING c.run_id, coalesce(c.spent, c.reserved) AS amount, c.calls, c.retries
), kept AS (
    INSERT INTO charges AS c (run_id, key, dispatch, reserved, spent, calls, retries, unsent)
    SELECT run_id, '', 0, 0, sum(amount), sum(calls), sum(retries), false FROM moved GROUP BY run_id ORDER BY run_id
    ON CONFLICT (run_id, key, dispatch) DO UPDATE SET
        spent = c.spent + excluded.spent, calls = c.calls + excluded.calls, retries = c.retries + excluded.retries
)
SELECT
    (SELECT count(*) FROM gone WHERE state = 'completed') AS completed, (SELECT count(*) FROM gone WHERE state <> 'completed') AS ended,
    (SELECT count(*) FROM failed) AS failures, (SELECT coalesce(sum(bytes), 0) FROM gone)::bigint AS bytes,
    (SELECT CASE WHEN count(*) = $3::integer THEN (SELECT key FROM page ORDER BY key DESC LIMIT 1) END FROM page) AS last;
