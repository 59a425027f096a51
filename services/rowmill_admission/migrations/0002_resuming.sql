-- Runs that are paused or halted can go on: which rows wait for that, and since when a run goes on again.

ALTER TABLE waits ADD COLUMN halted boolean NOT NULL DEFAULT false;  -- it waits for its run to be resumed
ALTER TABLE runs ADD COLUMN resumed_at timestamptz;                  -- when it was last resumed
