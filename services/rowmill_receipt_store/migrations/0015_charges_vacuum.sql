-- Charges are settled one by one, and each that is leaves an entry in the index of those under way, which whoever looks for these meets until the table
-- is vacuumed. By default that is after a fifth of it.

ALTER TABLE charges SET (autovacuum_vacuum_scale_factor = 0.05);
