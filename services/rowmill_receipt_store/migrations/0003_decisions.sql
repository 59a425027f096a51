-- The newest decision of admission that a run stands under. Older ones that come late change nothing; 0: only unnumbered ones came.

ALTER TABLE runs ADD COLUMN decision bigint NOT NULL DEFAULT 0;
