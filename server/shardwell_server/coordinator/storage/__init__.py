"""Durable state of the coordinator, in one SQLite file."""
