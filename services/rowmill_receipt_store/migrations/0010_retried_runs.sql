-- Since when a run's failed rows are worked again: failures of before answer none of its calls any more.

ALTER TABLE runs ADD COLUMN retried_at timestamptz;
