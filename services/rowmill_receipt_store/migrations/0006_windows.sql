-- What lanes may have sent of late: one row for each rate of a provider in an organisation, and of a tool that has its own. `sent`: what the
-- shard's holder reported at `reported_at`, as [seconds ago, requests]; `permits`: requests that it may send within `seconds` from then on.
-- `term`, `number`: of the holder's request; an older one changes nothing.
CREATE TABLE windows (
    name text PRIMARY KEY,
    term bigint NOT NULL,
    number bigint NOT NULL,
    reported_at timestamptz NOT NULL,
    sent bytea NOT NULL,
    permits integer NOT NULL,
    seconds double precision NOT NULL
) WITH (fillfactor = 20);
