"""Gradients between ranks: buckets, transports, shards, and the norm of the whole."""
