-- What was made of each command to pause or resume a run, by its message: one that comes again, to whichever instance and whatever was decided since,
-- makes nothing more. (Retries have a table of their own; a stop stands for good.)

CREATE TABLE commands (
    run_id text NOT NULL,
    identity text NOT NULL,                      -- the message's id
    decision bigint,                             -- of a resumption that is not carried out to its end: its number
    refused text NOT NULL DEFAULT '',            -- why it was not done, to a person
    heard_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_id, identity)
);
CREATE INDEX commands_heard ON commands (heard_at);
