-- When an output was taken out of use by pruning. Runs that started before still are served by it, so it is deleted only when they are all over.

ALTER TABLE receipts ADD COLUMN retired_at timestamptz;
