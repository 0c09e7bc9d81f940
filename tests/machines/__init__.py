"""Runs on several machines, or on a scheduler's imitation of them."""
