"""The step in flight: work items, reports of trainers, step proposals, and what was committed."""
