-- Charges that may still come back: settled by no outcome, and not known to stand for a dispatch of which nobody will tell. Only by this index are they found
-- among all charges of a run; as in 0013, the run is an expression in it, so that no plan takes it for anything else.

CREATE INDEX charges_open ON charges ((CASE WHEN spent IS NULL AND NOT unknown THEN run_id END)) WHERE spent IS NULL AND NOT unknown;
