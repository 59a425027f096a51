-- Which gateways there are, each by what it said last: the shards are shared among them. `joined_at`: when it was first heard of; names are new with each
-- start of a process. `serving`: it takes calls; who has left does not come back. `open`: requests that it has open in lanes of shards that it does not
-- hold, as [lane, requests]. `number`: of the request that said so; an older one changes nothing.
CREATE TABLE gateways (
    holder text PRIMARY KEY,
    number bigint NOT NULL,
    joined_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    serving boolean NOT NULL,
    open bytea NOT NULL
) WITH (fillfactor = 20);
