"""Which runs a sweep has (studies), what they say (results), the page (report)."""
