"""Ranks, stores, process groups and their failures. Importing this package loads no torch."""
