"""How much memory there is, for whom, and which of it trainers can map."""
