-- What pruning asks for: runs that could be retried still.

CREATE INDEX runs_retrying ON runs (created_at) WHERE retrying;
CREATE INDEX datasets_ended ON datasets (closed_at) WHERE state <> 'open'; -- of no column that counts change, so that these stay cheap
