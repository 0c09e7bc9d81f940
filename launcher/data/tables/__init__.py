"""Tables: rows of files by the names of their columns, and the sets of numbers made of them."""
