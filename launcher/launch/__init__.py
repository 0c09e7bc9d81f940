"""Parent mode: one warm process starts a run's workers, monitors and restarts them, and reports its end.

Importing this package imports no torch.
"""
