"""Flat memory of parameters and buffers, and parameter groups."""
