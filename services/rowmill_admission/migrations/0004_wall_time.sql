-- A budget of wall time: when it is over, and the time that does not count, in which the run waited for a person. `halted_at`: since when it does
-- (what came before the last decision is in `halted_seconds`).

ALTER TABLE runs ADD COLUMN deadline timestamptz;
ALTER TABLE runs ADD COLUMN halted_at timestamptz;
ALTER TABLE runs ADD COLUMN halted_seconds double precision NOT NULL DEFAULT 0;
