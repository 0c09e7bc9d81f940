"""Flat memory: layout, buffers, and the broadcast from rank 0."""
