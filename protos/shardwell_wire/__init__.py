"""The formats and rules that clients and servers share, byte for byte.

Note: [gRPC and fork]
    By default, gRPC stops its threads at a fork and restarts them in both processes. If calls are in flight, as in
    every trainer, this aborts the child: DataLoader workers die. Children that users fork never call gRPC, so fork
    support is disabled here. gRPC reads the variable only when ``grpc`` is imported. If another library has imported it
    before, trainers warn when they fork.
"""

import os as _os
import sys as _sys

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

GRPC_HANDLES_FORKS = _os.environ.get(_FORK_SUPPORT, str(int("grpc" in _sys.modules))).lower() in ("1", "true")
"""Whether forks can abort the child, because gRPC's fork support is on."""

if _FORK_SUPPORT not in _os.environ:
    _os.environ[_FORK_SUPPORT] = "0"
    import grpc as _grpc  # noqa: F401

    del _os.environ[_FORK_SUPPORT]  # programs started by this process keep the default
