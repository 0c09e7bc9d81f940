"""Experiment trackers: wandb."""
