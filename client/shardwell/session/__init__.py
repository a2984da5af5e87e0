"""A trainer in its run: how it joins, what it has to do in each step, and how it is restored."""
