"""What users see of the coordinator's state: descriptions, events and stall explanations."""
