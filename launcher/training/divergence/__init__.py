"""When a run has diverged, and what the error says of it. Import each module by its name."""
