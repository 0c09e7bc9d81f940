"""Detection of divergence, and the text of its error. Import each module by its name."""
