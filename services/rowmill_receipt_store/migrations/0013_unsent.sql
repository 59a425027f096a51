-- What budgets pay for and nobody has sent yet. `unsent`: the charge is reserved by a claim that is not confirmed, as its receipt says, which is right
-- where they differ. `claimed_at`: when it was reserved. What a process reserves that does not know these is taken for unsent, and looked at. Runs before
-- charges: in that order their locks are taken by who is at work meanwhile.

LOCK TABLE runs;
ALTER TABLE charges ADD COLUMN unsent boolean NOT NULL DEFAULT false, ADD COLUMN claimed_at timestamptz NOT NULL DEFAULT now();
ALTER TABLE charges ALTER COLUMN unsent SET DEFAULT true;
UPDATE charges c SET unsent = true FROM receipts r
WHERE r.state = 'queued' AND c.run_id = r.run_id AND c.key = r.key AND c.dispatch = r.dispatch + 1 AND c.spent IS NULL;

-- No plan takes it for anything else: it has the run only as an expression, and the primary key, which begins with the run, has no use for that.
CREATE INDEX charges_unsent ON charges ((CASE WHEN unsent THEN run_id END)) WHERE unsent;
