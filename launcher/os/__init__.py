"""One process: standard streams, signals, lifetime, terminal, shortage of memory or disk space."""
