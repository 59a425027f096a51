-- Decisions on a run (stop, halt, resume, budget) are numbered: raised in this row's own UPDATE, told to the receipt-store with each of them.

ALTER TABLE runs ADD COLUMN decision bigint NOT NULL DEFAULT 0;
