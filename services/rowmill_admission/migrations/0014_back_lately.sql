-- Rows that were called back and published lately: new rows of their run wait, since they may be sent back once more.

CREATE INDEX waits_back_lately ON waits (dataset_seq, released_at) WHERE called_back AND state = 'released';
