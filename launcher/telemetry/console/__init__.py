"""What a run prints for people."""
