"""What services share: bus, database, clock, ids, gathering into pages, settings, logging, health. Authors do not import it."""
