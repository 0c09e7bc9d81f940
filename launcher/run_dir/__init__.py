"""The files of a run: who may write them, what they hold, and how they appear whole."""
