-- Calls that their gateways die of. `deaths`: how often the running lease was taken over since an outcome was last reported; of a suspect only those
-- while it was alone. `alone`: the running dispatch went with nothing beside it in its gateway.

ALTER TABLE receipts ADD COLUMN deaths integer NOT NULL DEFAULT 0;
ALTER TABLE receipts ADD COLUMN alone boolean NOT NULL DEFAULT false;
