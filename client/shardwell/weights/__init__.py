"""Loads and saves the weights of a whole model, piece by piece."""
