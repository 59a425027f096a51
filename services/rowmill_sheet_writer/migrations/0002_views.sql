-- What may be read by SQL: views, in a schema of their own, for a role that may read nothing else. The role belongs to the whole server, so it
-- may be there already. A database user that may not make roles gets the views alone: then questions by SQL are refused, and all else works.

CREATE SCHEMA sheet_views;

CREATE VIEW sheet_views.rows AS
SELECT s.org, s.play, s.dataset, encode(r.row_key, 'hex') AS key, r.status, r.input, r.values AS cells, r.meta, r.error, r.run_number, r.attempt,
       r.completed_at
FROM sheets.sheet_rows AS r JOIN sheets.sheets AS s ON s.sheet_id = r.sheet_id;

CREATE VIEW sheet_views.run_rows AS
SELECT p.run_id, s.org, s.play, p.dataset, p.first_index + n AS index, encode(substring(p.row_keys FROM 32 * n + 1 FOR 32), 'hex') AS key,
       CASE substring(p.marks FROM n + 1 FOR 1)
           WHEN 'd' THEN 'duplicate' WHEN 'r' THEN 'reused' WHEN 's' THEN 'sent' WHEN 'k' THEN 'skipped' WHEN 'c' THEN 'completed'
           WHEN 'x' THEN 'cancelled' ELSE 'failed'
       END AS mark
FROM sheets.pages AS p JOIN sheets.sheets AS s ON s.sheet_id = p.sheet_id CROSS JOIN LATERAL generate_series(0, p.row_count - 1) AS n;

CREATE VIEW sheet_views.run_counts AS
SELECT c.run_id, s.org, s.play, c.dataset, c.run_number, c.admitted, c.completed, c.failed, c.cancelled, c.reused, c.duplicates, c.calls, c.cost
FROM sheets.dataset_counts AS c JOIN sheets.sheets AS s ON s.sheet_id = c.sheet_id;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'rowmill_sheet_reader') THEN
        BEGIN
            CREATE ROLE rowmill_sheet_reader NOLOGIN;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;  -- made by another database's migration meanwhile
        END;
    END IF;
    GRANT USAGE ON SCHEMA sheet_views TO rowmill_sheet_reader;
    GRANT SELECT ON ALL TABLES IN SCHEMA sheet_views TO rowmill_sheet_reader;
    IF NOT pg_has_role(current_user, 'rowmill_sheet_reader', 'member') THEN
        GRANT rowmill_sheet_reader TO CURRENT_USER;
    END IF;
EXCEPTION
    WHEN insufficient_privilege THEN RAISE NOTICE 'this user may not make the role rowmill_sheet_reader: sheets cannot be asked by SQL';
END
$$;
