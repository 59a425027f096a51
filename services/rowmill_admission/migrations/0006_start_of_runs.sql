-- A run starts when it is stored. Its transaction may have begun long before and waited: for a lock of that run, or for a question which run is the
-- oldest that is not over. A run that is stored after the answer must not have started before it.

ALTER TABLE runs ALTER COLUMN created_at SET DEFAULT clock_timestamp();
