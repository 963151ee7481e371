"""Rendering of analysis results: tables, charts, pages, reports, traces and the formats of other tools."""
