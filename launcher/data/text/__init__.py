"""Sets of texts: sentences with labels, and plain text."""
