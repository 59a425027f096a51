-- Sheets and page records. A sheet outlives runs and holds, per row key, the cells that were written last; a page record holds how the rows of
-- one page of one run stand. There are no foreign keys: every row would pay for a check that the single writer of these tables makes anyway.

-- A sheet is (organisation, play, dataset key).
CREATE TABLE sheets (
    sheet_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    org text NOT NULL,
    play text NOT NULL,
    dataset text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (org, play, dataset)
);

-- One row of a sheet, as the last write left it. Writes are ordered by (run_number, attempt), at equality by standing:
-- 0 partial, 1 failed as a dead letter, 2 failed or cancelled, 3 completed.
-- input, values, meta are json, not jsonb: the text is kept byte for byte, NUL escapes included.
-- cells_kept: the last write carried no cells (cancelled before it ran, dead-lettered): status and error are its own, input, values and meta are
-- those of an earlier write, which a later run may still reuse.
-- shadows: an output column is named like an input column.
CREATE TABLE sheet_rows (
    sheet_id bigint NOT NULL,
    run_number bigint NOT NULL,
    completed_at timestamptz,
    attempt integer NOT NULL,
    standing smallint NOT NULL,
    shadows boolean NOT NULL DEFAULT false,
    cells_kept boolean NOT NULL DEFAULT false,
    row_key bytea NOT NULL,
    status text NOT NULL,
    input json,
    values json,
    meta json,
    error json,
    PRIMARY KEY (sheet_id, row_key)
) WITH (fillfactor = 85);

-- One page of one run's dataset, its rows in input order: row i has the key at bytes 32 i to 32 i + 31 of row_keys and the index first_index + i.
-- marks: a letter per row: d duplicate, r reused, s sent, k skipped, c completed, f failed, l failed as a dead letter, x cancelled.
-- ends: {position: [attempt, calls, cost]} of rows that ended otherwise than at the first attempt without a live call.
-- inputs: {position: input row} of rows whose input is not the sheet row's: duplicates, mostly.
CREATE TABLE pages (
    run_id text NOT NULL,
    dataset text NOT NULL,
    page integer NOT NULL,
    sheet_id bigint NOT NULL,
    first_index bigint NOT NULL,
    row_count integer NOT NULL,
    marks text NOT NULL,
    row_keys bytea NOT NULL,
    ends json,
    inputs json,
    PRIMARY KEY (run_id, dataset, page)
) WITH (fillfactor = 70);

CREATE INDEX pages_by_index ON pages (run_id, dataset, first_index);

ALTER TABLE pages ALTER COLUMN row_keys SET STORAGE EXTERNAL;  -- digests do not compress

-- The counts of one run's dataset, changed in the same commit as its pages; version rises with every change.
CREATE TABLE dataset_counts (
    run_id text NOT NULL,
    dataset text NOT NULL,
    sheet_id bigint NOT NULL,
    run_number bigint NOT NULL,
    version bigint NOT NULL,
    admitted bigint NOT NULL,
    completed bigint NOT NULL,
    failed bigint NOT NULL,
    cancelled bigint NOT NULL,
    reused bigint NOT NULL,
    duplicates bigint NOT NULL,
    calls bigint NOT NULL,
    cost numeric NOT NULL,
    first_error json,
    PRIMARY KEY (run_id, dataset)
) WITH (fillfactor = 50);

-- Events whose publishing was not confirmed in time; a background loop sends and deletes them.
CREATE TABLE events_owed (
    event_id text PRIMARY KEY,
    routing_key text NOT NULL,
    message_type text NOT NULL,
    run_id text NOT NULL,
    body bytea NOT NULL,
    noted_at timestamptz NOT NULL DEFAULT now()
);
