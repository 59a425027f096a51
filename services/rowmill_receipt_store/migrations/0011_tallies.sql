-- What runs were charged, to be told at any time without adding up their charges. A run's rows add up to it. Each session of the database adds to a row
-- of its own (`session`: its process id; 0: what was charged before there were tallies), in the statement that changes the charges, so that claims of
-- one run do not wait for each other. `charged`: the sum of the run's charges (spent, else reserved). `calls`: dispatches that were made for it, or
-- are about to be, whether or not they cost anything. `changes`: how often that changed.
CREATE TABLE tallies (
    run_id text NOT NULL,
    session integer NOT NULL,
    changes bigint NOT NULL,
    charged numeric NOT NULL,
    calls bigint NOT NULL,
    PRIMARY KEY (run_id, session)
) WITH (fillfactor = 50);

-- Of calls from before only those are known that cost something, or that a budget counted.
INSERT INTO tallies (run_id, session, changes, charged, calls)
SELECT run_id, 0, 1, sum(coalesce(spent, reserved)), sum(CASE WHEN calls + retries > 0 THEN calls + retries WHEN key <> '' THEN 1 ELSE 0 END)
FROM charges GROUP BY run_id;

-- Whether the newest claim or dispatch is tallied as a call of its run.
ALTER TABLE receipts ADD COLUMN counted boolean NOT NULL DEFAULT false;
