-- Who was away together comes back in any order: the holder of a lapsed shard is waited for while others ask for it (see `lease_shards`).
-- `contested_since`: since when others have asked for the shard without the holder renewing it; `contested_at`: when they last did.
ALTER TABLE shards ADD COLUMN contested_since timestamptz, ADD COLUMN contested_at timestamptz;
