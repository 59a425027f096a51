-- Budgets of calls, retries and wall time beside money. `counts`: a budget of calls or retries was given at some time, and from then on every
-- dispatch of the run has a charge, whether or not it costs money. `calls`, `retries`: the sums over the run's charges. `deadline`: when its wall time
-- of `wall_limit` seconds is over. `exceeded`: an actual cost above its reservation was booked, and the run was halted for it.

ALTER TABLE runs ADD COLUMN calls_limit bigint;
ALTER TABLE runs ADD COLUMN calls bigint NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN retries_limit bigint;
ALTER TABLE runs ADD COLUMN retries bigint NOT NULL DEFAULT 0;
ALTER TABLE runs ADD COLUMN counts boolean NOT NULL DEFAULT false;
ALTER TABLE runs ADD COLUMN wall_limit double precision;
ALTER TABLE runs ADD COLUMN deadline timestamptz;
ALTER TABLE runs ADD COLUMN exceeded boolean NOT NULL DEFAULT false;

-- A dispatch is one call of its run, or one retry where an earlier dispatch of the same call stands.
ALTER TABLE charges ADD COLUMN calls integer NOT NULL DEFAULT 0;
ALTER TABLE charges ADD COLUMN retries integer NOT NULL DEFAULT 0;
