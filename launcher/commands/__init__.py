"""One module per command, and how the command line is read."""
