"""The sheet writer: owns sheets and page records (schema ``sheets``), and tells what was committed. Authors do not import it."""
