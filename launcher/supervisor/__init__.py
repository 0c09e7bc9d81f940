"""Parent mode: one warm process starts the workers of a run, watches and restarts them, says what ended it.

The engine is torch's elastic agent. Importing this package imports no torch.
"""
