"""What clients and servers must agree on, byte for byte.

Note: gRPC and fork
    By default gRPC stops its threads at a fork and starts them again in both processes. While calls are in flight, as
    a trainer's always are, that aborts the child: a DataLoader with workers dies. The children that users fork never
    call gRPC, so this is switched off. gRPC reads the switch only once, when it is imported.
"""

import os as _os

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"

if _FORK_SUPPORT not in _os.environ:
    _os.environ[_FORK_SUPPORT] = "0"
    import grpc as _grpc  # noqa: F401

    del _os.environ[_FORK_SUPPORT]  # other programs that this process starts are not concerned
