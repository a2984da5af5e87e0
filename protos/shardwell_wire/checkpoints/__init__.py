"""The checkpoint format and its storage, which trainers, shard servers and the coordinator share. Imports no torch.

docs/checkpoints.md specifies the format.
"""
