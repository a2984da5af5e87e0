"""Estimates what a training run needs, before it starts: the ``shardwell plan`` command."""
