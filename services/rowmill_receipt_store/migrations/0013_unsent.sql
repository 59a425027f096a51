-- What budgets pay for and nobody has sent yet. `unsent`: the charge is reserved by a claim that is not confirmed. Of a run it is the sum over its
-- charges, by kind: so much may come back, and is none of what it has spent for good.

ALTER TABLE charges ADD COLUMN unsent boolean NOT NULL DEFAULT false;
UPDATE charges c SET unsent = true FROM receipts r
WHERE r.key = c.key AND r.run_id = c.run_id AND r.state = 'queued' AND c.dispatch = r.dispatch + 1 AND c.spent IS NULL;

ALTER TABLE runs ADD COLUMN unsent numeric NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN unsent_calls bigint NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN unsent_retries bigint NOT NULL DEFAULT 0;
UPDATE runs SET unsent = c.money, unsent_calls = c.calls, unsent_retries = c.retries
FROM (SELECT run_id, sum(reserved) AS money, sum(calls) AS calls, sum(retries) AS retries FROM charges WHERE unsent GROUP BY run_id) AS c
WHERE runs.run_id = c.run_id;
