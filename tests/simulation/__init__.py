"""Deterministic simulation of a cluster: real coordinator and shard server cores, model trainers, a simulated network.

``python -m tests.simulation`` explores random schedules; ``--seed N --trace`` replays one and shows what happens.

One schedule is one run of a few steps on an event loop with virtual time. A random generator with the schedule's seed
decides how long each message travels and which faults happen: crashes and restarts of any process, also at the named
fault points, stopped processes, partitions, broken connections, lost answers and a full disk. The run must finish once
the faults are over, and every version that anyone reads must have the bits of the run without faults.
"""
