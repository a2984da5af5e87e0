"""Fetches, pushes and caches the units of a run in the background."""
