"""Replicas: how the trainers of one meet, and what they check together."""
