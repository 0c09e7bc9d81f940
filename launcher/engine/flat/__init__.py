"""Flat memory: layout, allocation, buffers, and the broadcast from rank 0."""
