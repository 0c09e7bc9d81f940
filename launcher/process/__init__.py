"""What belongs to one process: standard streams, signals, lifetime, terminal, lack of memory or room."""
