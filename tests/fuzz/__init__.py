"""Structured fuzzing of every rpc, of socket frames and of the shared-memory handshake.

``messages.py`` makes and changes messages by their descriptors, so a new rpc is fuzzed without new code.
``handlers.py`` calls the handlers of a server in this process without a connection, and records the requests of a short
training. Values of recorded requests get changed messages past the first checks. ``make test`` runs a few thousand
messages. ``make fuzz`` runs as many as wanted beside a training run; see ``__main__.py``.
"""
