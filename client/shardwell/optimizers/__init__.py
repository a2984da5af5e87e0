"""Optimizers over parameters that are not here: on the servers, or on this trainer's partitions."""
