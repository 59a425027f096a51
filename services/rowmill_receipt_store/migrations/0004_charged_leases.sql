-- The lease that a charge was reserved for: by it a holder that never heard its dispatch number can say that nothing was sent.

ALTER TABLE charges ADD COLUMN lease_id text NOT NULL DEFAULT '';
UPDATE charges c SET lease_id = r.lease_id FROM receipts r
WHERE r.key = c.key AND r.run_id = c.run_id AND c.dispatch = r.dispatch + (r.state = 'queued')::integer AND c.spent IS NULL;
