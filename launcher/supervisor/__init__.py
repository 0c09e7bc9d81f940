"""Parent mode: one warm process starts a run's workers, monitors and restarts them, and reports its end.

The engine is torch's elastic agent. Importing this package imports no torch.
"""
