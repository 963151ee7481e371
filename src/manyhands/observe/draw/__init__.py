"""What was found, drawn: tables, charts, pages, reports, traces, and the formats of other tools. Decides nothing."""
