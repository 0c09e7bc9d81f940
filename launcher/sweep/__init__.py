"""Hydra's multirun in the launcher's own process."""
