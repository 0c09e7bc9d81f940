"""The evaluations of a run in training: when, whether they end it, and what the recipe shows after them."""
