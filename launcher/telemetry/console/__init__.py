"""The console output of a run."""
