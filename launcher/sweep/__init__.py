"""Hydra's multirun within the launcher's process."""
