-- Requests for retries are forgotten once their runs can be retried no more.

CREATE INDEX retries_asked ON retries (asked_at);
