"""The ``shardwell`` command."""
