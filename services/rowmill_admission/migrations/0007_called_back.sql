-- Rows that are called back, since the provider that they waited for serves again: they go before rows of their run that were not admitted yet.

ALTER TABLE waits ADD COLUMN called_back boolean NOT NULL DEFAULT false;
CREATE INDEX waits_called_back ON waits (dataset_seq) WHERE called_back AND state <> 'released';
