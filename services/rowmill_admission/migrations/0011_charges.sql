-- What a run was charged, and its calls, as the receipt-store told it last (its `version`: the highest wins; 0: nothing was heard yet, and it is what
-- the rows of the run that ended well cost).

ALTER TABLE runs ADD COLUMN charged numeric NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN calls bigint NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN charges_version bigint NOT NULL DEFAULT 0;
UPDATE runs r SET charged = d.cost, calls = d.calls
FROM (SELECT run_id, sum(cost) AS cost, sum(calls) AS calls FROM datasets GROUP BY run_id) d WHERE d.run_id = r.run_id AND (d.calls > 0 OR d.cost > 0);
