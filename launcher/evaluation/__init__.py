"""Exact evaluation over all ranks, and the metrics made from it."""
