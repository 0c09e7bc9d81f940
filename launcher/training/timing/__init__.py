"""How long the parts of a step take on each rank, which rank or link others wait for, and what follows."""
