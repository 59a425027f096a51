-- Leases of executors end with more than their time: with their process's presence, and with the term of the body that holds them.

ALTER TABLE receipts ADD COLUMN presence text, ADD COLUMN run_term bigint;

-- That a process is there, as it said last. One that lapsed ends when others have asked for one of its leases for a while (see `end_presences`), and
-- then for good: only so can its process know that what it was told to hold was not taken. `contested_since`, `contested_at`: as with shards.
CREATE TABLE presences (
    presence text PRIMARY KEY,
    expires_at timestamptz NOT NULL,
    ended boolean NOT NULL DEFAULT false,
    contested_since timestamptz,
    contested_at timestamptz
) WITH (fillfactor = 20);
