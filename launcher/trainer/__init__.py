"""One run on one rank: the loop and what watches, saves, evaluates and ends it."""
