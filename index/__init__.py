"""Secondary indexes over the keys of a table."""
