-- Who keeps a row waiting: when that one serves again, the row comes back without waiting for its time.

ALTER TABLE waits ADD COLUMN provider text NOT NULL DEFAULT '';
CREATE INDEX waits_for_provider ON waits (provider) WHERE state = 'waiting' AND provider <> '';
