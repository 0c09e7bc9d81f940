"""Updates of the flat memory."""
