"""Proves a machine's GPU in nine minutes: bits, recovery, speed and memory of Shardwell with trainers on CUDA devices.

``python -m benchmarks.gpu_check`` runs every check in a process of its own. ``task.py`` has what a check can use, and
the other files have the checks.
"""
