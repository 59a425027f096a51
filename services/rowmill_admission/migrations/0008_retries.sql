-- Runs whose failed rows are worked again (SPEC 5.3). `attempt`: of the rows that are worked now. `retrying`: a retry is asked for and being prepared;
-- until it is, the run is over still. `code_digest`: of a run that was retried, the code that works its rows since (null: whichever code there is).

ALTER TABLE runs ADD COLUMN attempt integer NOT NULL DEFAULT 1;
ALTER TABLE runs ADD COLUMN retrying boolean NOT NULL DEFAULT false;
ALTER TABLE runs ADD COLUMN code_digest text;

-- A dataset that was closed and is open again, until the run's body has come to it: nothing of it is admitted or published before.
ALTER TABLE datasets ADD COLUMN reopened boolean NOT NULL DEFAULT false;

-- What made a retry, so that the same message does not make two.
CREATE TABLE retries (
    run_id text NOT NULL,
    identity text NOT NULL,
    asked_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_id, identity)
);
