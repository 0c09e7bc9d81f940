"""Diagnostics of a step: non-finite values, gradient exponents, timing, mean losses."""
