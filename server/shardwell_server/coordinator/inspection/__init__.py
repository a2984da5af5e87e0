"""Descriptions, events and stall explanations."""
