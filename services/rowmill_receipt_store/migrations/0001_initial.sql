-- The receipt-store's tables: receipts, the failures kept beside them, charges, what is known of runs, and who may spend for a shard.

-- One unit of outside work by the digest of all that makes two units the same (SPEC 3.1). The row holds the newest lease and, beside it, the
-- newest output: a refresh keeps the former output until the new one is stored. `revision` rises with every change, so that a decision taken
-- on a row that was read can be stored only if nobody changed it since. Nothing but the key is indexed, and pages are filled to half: an
-- update then stays in its page and touches no index.
CREATE TABLE receipts (
    key bytea PRIMARY KEY CHECK (octet_length(key) = 32),
    revision bigint NOT NULL,
    state text NOT NULL CHECK (state IN ('queued', 'running', 'completed', 'failed', 'released', 'outcome_unknown')),
    dispatch integer NOT NULL,          -- the newest dispatch: raised by each confirmation, never used twice
    lease_id text NOT NULL,
    holder text NOT NULL,
    run_id text NOT NULL,
    caller text NOT NULL,
    org text NOT NULL,
    tool text NOT NULL,
    effect text NOT NULL,
    shard integer,                      -- the lease ends with this shard's term
    term bigint,
    batch_id text NOT NULL DEFAULT '',  -- the request that carries the running dispatch
    reserved numeric NOT NULL,          -- what the claim reserved for its dispatch; the charge itself is in `charges`
    took_over boolean NOT NULL,         -- an earlier dispatch may have had its effect
    expires_at timestamptz NOT NULL,
    last_failure bytea,                 -- of the newest dispatch that failed or whose outcome is unknown: for the operator
    output bytea,
    no_result boolean NOT NULL DEFAULT false,
    cost numeric,
    completed_at timestamptz,
    output_dispatch integer,
    output_run text,                    -- who paid for the output
    output_caller text
) WITH (fillfactor = 50);

-- A final failure holds for its run: a redelivery does not call again, another run does (SPEC 3.6).
CREATE TABLE failures (
    key bytea NOT NULL,
    run_id text NOT NULL,
    dispatch integer NOT NULL,
    failure bytea NOT NULL,
    failed_at timestamptz NOT NULL,
    PRIMARY KEY (key, run_id)
);

-- What a dispatch costs its run. Reserved by the claim for the dispatch to come; `spent` is set once, when it is known. Only what costs
-- something has a row.
CREATE TABLE charges (
    run_id text NOT NULL,
    key bytea NOT NULL,
    dispatch integer NOT NULL,
    reserved numeric NOT NULL,
    spent numeric,
    unknown boolean NOT NULL DEFAULT false,  -- sent, outcome not known: stays charged
    PRIMARY KEY (run_id, key, dispatch)
) WITH (fillfactor = 80);

-- Runs that were ever stopped, halted or given a budget; of all others nothing needs to be known. `charged` is the sum of the run's charges
-- (spent, else reserved), kept with each of them from the moment that the row is made.
CREATE TABLE runs (
    run_id text PRIMARY KEY,
    state text NOT NULL CHECK (state IN ('running', 'halted', 'stopped')),
    reason text NOT NULL,
    budget numeric,
    charged numeric NOT NULL
) WITH (fillfactor = 20);

-- The right to spend for a shard of lanes. Terms rise at each change of hands. `ended_term`: leases claimed under this term or an older one
-- are over, because their holder let the shard expire; a holder that gave it up in good order keeps its leases.
CREATE TABLE shards (
    shard integer PRIMARY KEY,
    term bigint NOT NULL,
    holder text,
    expires_at timestamptz NOT NULL,
    ended_term bigint NOT NULL
) WITH (fillfactor = 20);
