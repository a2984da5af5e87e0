"""Descriptors of a shard server's shared files, which trainers receive over a Unix socket in the server's folder.

Note: [Descriptors, not paths]
    A server's files belong to the server's user, and no other user can open them. A trainer that has opened a shm
    transport connects to the socket, sends the transport's token and the name of a file, and receives a descriptor. The
    server sends only files that it has named in answers to this transport: values with a read-only descriptor, and the
    transport's own buffers with a writable one. Buffers are sealed, so that no trainer can change their size: the
    server would get SIGBUS. A connection carries one request and one answer, each in one packet.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

from shardwell_wire.shared_files import UntrustedFileError, file_size, opened, server_folder

SOCKET_NAME = "socket"
"""Name of the socket in the server's folder."""
TOKEN_BYTES = 32
MAX_REQUEST_BYTES = 256
ANSWER = b"file"
"""The packet that carries a descriptor. A server without such a file closes the connection."""

_LIMIT_S = 20
_TIMEVAL = struct.Struct("ll")


def request(token: bytes, name: str) -> bytes:
    """Returns the request for a file."""
    return token + name.encode()


def receive_descriptor(
    path: str, user_id: int, token: bytes, name: str, *, size_bytes: int | None = None, max_bytes: int | None = None
) -> int:
    """Returns a descriptor of a file of a shard server.

    Args:
        path: Path of the server's socket.
        user_id: The server's user, who must own the folder and the file.
        token: Token of the shm transport.
        name: Name of the file.
        size_bytes: Expected size of the buffer in the file. None: any size.
        max_bytes: Largest size of the file. None: any size.

    Raises:
        UntrustedFileError: The folder or the file belongs to another user, or the file has another size.
        FileNotFoundError: The server has ended, the transport is closed, or the server has removed the file.
        OSError: The socket cannot be reached.
    """
    descriptor = _receive(path, user_id, request(token, name), name)
    try:
        if (problem := _problem(os.fstat(descriptor), user_id, size_bytes, max_bytes)) is not None:
            raise UntrustedFileError(errno.EPERM, problem, name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _receive(path: str, user_id: int, packet: bytes, name: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        opened(os.open(server_folder(path), flags)) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        found = os.fstat(folder)
        # Only its owner can put a socket into the folder. Another user could have made a folder of the same name.
        if found.st_uid != user_id or found.st_mode & 0o022:
            actual = f"one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
            raise UntrustedFileError(
                errno.EPERM, f"expected a folder that only user {user_id} can write to, found {actual}", path
            )
        # Blocking: with a timeout of Python, connecting fails when the server has not yet accepted other connections.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(_LIMIT_S, 0))
        try:
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")  # paths of sockets must be short
            connection.send(packet)
            _, descriptors, _, _ = socket.recv_fds(connection, len(ANSWER), 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise TimeoutError(errno.ETIMEDOUT, f"the shard server did not answer within {_LIMIT_S} s", path) from None
        except ConnectionError:
            descriptors = []
    if not descriptors:
        raise FileNotFoundError(errno.ENOENT, "the shard server has ended, or does not offer the file any more", name)
    return descriptors[0]


def _problem(found: os.stat_result, user_id: int, size_bytes: int | None, max_bytes: int | None) -> str | None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != user_id:
        return (
            f"expected a regular file of user {user_id}, found one of user {found.st_uid} with mode {found.st_mode:o}"
        )
    if size_bytes is not None and found.st_size != file_size(size_bytes):
        return f"expected a file of {file_size(size_bytes)} bytes, found {found.st_size}"
    if max_bytes is not None and found.st_size > max_bytes:
        return f"expected a file of at most {max_bytes} bytes, found {found.st_size}"
    return None
