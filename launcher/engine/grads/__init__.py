"""Gradients between ranks: buckets, collectives, shards, and the norm of the whole."""
