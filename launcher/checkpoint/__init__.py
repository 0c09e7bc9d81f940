"""Checkpoints: published atomically, verified before use, chosen once for all ranks.

A checkpoint is a directory `step-00000100` of safetensors and JSON. Reading one executes nothing.
"""
