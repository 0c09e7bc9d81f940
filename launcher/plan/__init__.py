"""What a run would need and do, computed before it starts: memory, bytes on the wire, steps, files."""
