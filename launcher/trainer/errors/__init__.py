"""How a failure of a rank, of the recipe or for lack of memory is explained to the user and passed on."""
