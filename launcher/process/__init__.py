"""What belongs to the process itself: standard streams, lifetime, terminal, lack of memory or room."""
