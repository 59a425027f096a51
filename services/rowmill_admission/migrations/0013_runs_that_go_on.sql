-- Rows that wait are found by their dataset, of runs that go on: those that are due, and of those that wait for a provider the oldest; and when the last
-- one came of each. So neither other runs' rows nor those of other organisations are read, however many there are.

CREATE INDEX runs_unfinished_of_org ON runs (org) WHERE state IN ('queued', 'running', 'waiting');
DROP INDEX waits_waiting;
CREATE INDEX waits_waiting ON waits (dataset_seq, due_at) WHERE state = 'waiting';
DROP INDEX waits_for_provider;
CREATE INDEX waits_for_provider ON waits (provider, dataset_seq, asked NULLS FIRST, row_index)
    WHERE state = 'waiting' AND NOT halted AND provider <> '';
CREATE INDEX waits_came ON waits (provider, dataset_seq, released_at) WHERE state <> 'waiting' AND provider <> '';
