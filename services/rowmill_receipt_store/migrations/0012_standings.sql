-- What is known of a lane's provider, for whoever holds its shard next: one row for each lane that stood otherwise than a new one does, by what the
-- shard's holder said last. `closed_until`: nothing is sent before. `share`: of what is declared, so much the provider bears. `missed`: how often in a
-- row it could not be reached, where that is often. `away_since`: since when it has not served; NULL: it serves. `term`, `number`: of the holder's
-- request; an older one changes nothing.
CREATE TABLE standings (
    shard integer NOT NULL,
    lane text NOT NULL,
    term bigint NOT NULL,
    number bigint NOT NULL,
    told_at timestamptz NOT NULL,
    closed_until timestamptz NOT NULL,
    share double precision NOT NULL,
    missed integer NOT NULL,
    away_since timestamptz,
    PRIMARY KEY (shard, lane)
) WITH (fillfactor = 20);
