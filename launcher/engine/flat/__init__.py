"""Flat memory: layout, allocation, buffers, and their copies from rank 0."""
