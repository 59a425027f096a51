-- Runs, their inputs and datasets, what waits, and the messages that are owed. One schema, one owner: admission.

CREATE TABLE runs (
    run_id text PRIMARY KEY,
    number bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    identity text NOT NULL,                      -- what makes two messages the same run: the run id, or the body's digest
    org text NOT NULL,
    play text NOT NULL,
    state text NOT NULL CHECK (state IN ('queued', 'running', 'waiting', 'completed', 'failed', 'cancelled')),
    input json NOT NULL,
    inputs json NOT NULL,                        -- [{"input_id", "field"}]
    options json NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    waiting_for text,
    output json NOT NULL DEFAULT 'null',
    error json,
    stop_reason text,                            -- not null: a RunStop is stored
    halt_reason text,                            -- not null: nothing new is admitted until an operator resumes
    term bigint NOT NULL DEFAULT 0,              -- of the body's lease; raised by each take
    lease_id text,
    lease_until timestamptz,
    released_term bigint NOT NULL DEFAULT 0,
    advance_wanted boolean NOT NULL DEFAULT false, -- something changed while the body was running: it must run once more
    advanced_at timestamptz NOT NULL DEFAULT now(),
    advances integer NOT NULL DEFAULT 0          -- repetitions of AdvanceRun since the last take
);
CREATE INDEX runs_by_identity ON runs (identity, number);
CREATE INDEX runs_unfinished ON runs (number) WHERE state IN ('queued', 'running', 'waiting');

-- A RunStop may come before its RunStart.
CREATE TABLE stops (
    run_id text PRIMARY KEY,
    reason text NOT NULL,
    stored_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE recorded_calls (
    run_id text NOT NULL,
    position integer NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    request text NOT NULL,
    result json NOT NULL,
    PRIMARY KEY (run_id, position)
);

CREATE TABLE inputs (
    input_id text PRIMARY KEY,
    state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'sealed', 'failed')),
    pages integer NOT NULL DEFAULT 0,            -- that arrived
    rows bigint NOT NULL DEFAULT 0,
    seal_pages integer,                          -- that the seal speaks of; null: the seal has not come
    seal_rows bigint,
    seal_digest text,
    error json,
    created_at timestamptz NOT NULL DEFAULT now(),
    changed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX inputs_open ON inputs (changed_at) WHERE state = 'open';

CREATE TABLE input_pages (
    input_id text NOT NULL,
    page integer NOT NULL,
    rows integer NOT NULL,
    digest bytea NOT NULL,
    body bytea NOT NULL,                         -- a JSON array of the rows' texts as they came
    PRIMARY KEY (input_id, page)
);
ALTER TABLE input_pages ALTER COLUMN body SET STORAGE EXTERNAL; -- compressing costs more than it saves on loopback

CREATE TABLE run_inputs (
    input_id text NOT NULL,
    run_id text NOT NULL,
    PRIMARY KEY (input_id, run_id)
);

CREATE TABLE datasets (
    dataset_seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text NOT NULL REFERENCES runs,
    dataset text NOT NULL,
    input_id text NOT NULL,
    definition json NOT NULL,                    -- the OpenDataset that was stored first
    state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'closed', 'failed')),
    error json,                                  -- why admission stopped or the dataset failed
    opened_at timestamptz NOT NULL DEFAULT now(),
    closed_at timestamptz,
    -- the feeder
    page_rows integer NOT NULL,                  -- where pages are cut, fixed at opening so that every feeder cuts alike
    row_limit bigint,
    run_window integer NOT NULL,                 -- rows of the run in flight at most
    feeder_term bigint NOT NULL DEFAULT 0,
    feeder_id text,
    feeder_until timestamptz,
    next_page integer NOT NULL DEFAULT 0,
    next_index bigint NOT NULL DEFAULT 0,
    input_page integer NOT NULL DEFAULT 0,
    input_offset integer NOT NULL DEFAULT 0,
    admitted bigint NOT NULL DEFAULT 0,
    sent bigint NOT NULL DEFAULT 0,              -- rows that ever went to executors
    sent_bytes bigint NOT NULL DEFAULT 0,
    admission_done boolean NOT NULL DEFAULT false,
    -- counts, absolute, from the sheet-writer; the highest version wins
    version bigint NOT NULL DEFAULT 0,
    completed bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    cancelled bigint NOT NULL DEFAULT 0,
    reused bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,
    calls bigint NOT NULL DEFAULT 0,
    cost numeric NOT NULL DEFAULT 0,
    first_error json,
    counted_at timestamptz NOT NULL DEFAULT now(),
    progress_at timestamptz,
    UNIQUE (run_id, dataset)
) WITH (fillfactor = 50);
CREATE INDEX datasets_open ON datasets (dataset_seq) WHERE state = 'open';
CREATE INDEX datasets_by_input ON datasets (input_id) WHERE state = 'open';

-- What was published: how to cut the page from the input again, and the digests by which later pages find duplicates.
CREATE TABLE pages (
    dataset_seq bigint NOT NULL,
    page integer NOT NULL,
    first_index bigint NOT NULL,
    rows integer NOT NULL,
    input_page integer NOT NULL,
    input_offset integer NOT NULL,
    duplicates integer[] NOT NULL,               -- places in the page
    sent integer NOT NULL,
    bytes integer NOT NULL,
    digests bytea NOT NULL,                      -- 16 bytes for each key met first in this page
    published_at timestamptz NOT NULL DEFAULT now(),
    repetitions integer NOT NULL DEFAULT 0,
    PRIMARY KEY (dataset_seq, page)
);
ALTER TABLE pages ALTER COLUMN digests SET STORAGE EXTERNAL;

-- Rows that wait outside any process. 'releasing': due, about to be published; 'released': published again, kept for its number of waits.
CREATE TABLE waits (
    dataset_seq bigint NOT NULL,
    row_index bigint NOT NULL,
    key text NOT NULL,
    page integer NOT NULL,
    attempt integer NOT NULL,
    waits integer NOT NULL,
    state text NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'releasing', 'released')),
    due_at timestamptz,                          -- null: until something happens
    asked double precision,
    reason text NOT NULL,
    released_at timestamptz,
    PRIMARY KEY (dataset_seq, row_index)
);
CREATE INDEX waits_due ON waits (due_at) WHERE state = 'waiting';
CREATE INDEX waits_releasing ON waits (released_at) WHERE state = 'releasing';
CREATE INDEX waits_waiting ON waits (dataset_seq) WHERE state = 'waiting';

CREATE TABLE events (
    event_id text PRIMARY KEY,
    name text NOT NULL,
    key text NOT NULL,
    payload json NOT NULL,
    arrived_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX events_by_name ON events (name, key);
CREATE INDEX events_by_age ON events (arrived_at);

-- Messages that a commit calls for, deleted once they are confirmed (or answered, where they are asked).
CREATE TABLE owed (
    owed_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run_id text NOT NULL,
    lane text NOT NULL,                          -- a run's messages of one lane go in order
    exchange text NOT NULL,
    key text NOT NULL,
    message_type text NOT NULL,
    body bytea NOT NULL,
    asked boolean NOT NULL,
    owed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX owed_by_run ON owed (run_id, lane, owed_id);
