"""What happens around the step: a file per feature, with the moments of a run that it needs."""
