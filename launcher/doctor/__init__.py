"""Whether a machine, and the links between machines, can do what a run will ask of them."""
