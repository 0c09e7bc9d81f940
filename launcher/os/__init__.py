"""One process: standard streams, signals, lifetime, shortage of memory or disk space."""
