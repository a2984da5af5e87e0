"""The weights of a whole model, from files and to them, a piece at a time."""
