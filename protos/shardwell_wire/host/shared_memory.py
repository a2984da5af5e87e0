"""Shared memory of a host: words and segments that change while they are read, and files of other processes.

A segment contains the parameters of one shard. The first 8 bytes of its first page are the readable version, and the
bytes of the shard follow the page. A reader loads the version before and after it reads, and again when it releases a
mapping: if the version did not change, the bytes did not change either.

A shard server and a trainer prove to each other that they share memory. The server makes a file that starts with a
proof, which the server also sends, and goes on with a nonce, which it does not send. The trainer finds the proof in the
file that it mapped. It sends the nonce with every request, so the server knows that the sender can read its files. They
are private to one user of one host.

Note: [Memory ordering]
    The version is a sequence lock. The writer stores ``UPDATING`` before the first byte of the next version, and the
    new version after the last byte. Another thread writes the bytes in between; passing the work between the threads
    orders the stores. The reader must load the version after its last load of the bytes, which
    ``order_loads`` in the client ensures.
    Both sides access the version as one aligned native word, so no torn version is visible. See ``store_word``.

Note: [Trust between users]
    A process that maps a file gets SIGBUS if another process truncates the file, and writes to a mapping change the
    file. This is harmless between processes of one user, which can kill and trace each other anyway, but must not be
    possible between users. Every file that is opened by its path therefore belongs to the user of this process, in a
    folder that only this user can list and write to. Files that a peer names are never created or truncated. Files of a
    server of another user are not opened by their paths; see Note: [Descriptors, not paths].

Note: [Descriptors, not paths]
    A server's files belong to the server's user, and no other user can open them. A trainer that has opened a shm
    transport connects to a Unix socket in the server's folder, sends the transport's token and the name of a file, and
    receives a descriptor. The server sends only files that it has named in answers to this transport: values with a
    read-only descriptor, and the transport's own buffers with a writable one. Buffers are sealed, so that no trainer
    can change their size: the server would get SIGBUS. A connection carries one request and one answer, each in one
    packet.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

from shardwell_wire.encoding.chunk_streams import Buffer
from shardwell_wire.model.layout import BLOCK_BYTES

_BYTES = 8
_ALL_BITS = (1 << 8 * _BYTES) - 1


def store_word(place: memoryview, word: int) -> None:
    """Stores a signed or unsigned word of native byte order at an aligned place, with one store of the processor.

    ``struct.pack_into`` needs two: it clears the bytes first. Another process may read the 0, and a process that is
    killed in between leaves it.
    """
    place[:_BYTES].cast("Q")[0] = word & _ALL_BITS


HEAD_BYTES = BLOCK_BYTES
"""Size of the header: one page, so that the shard can be mapped. Shards are cut at multiples of this size too."""

UPDATING = -1
"""Stored instead of a version while the next version is written, and after the shard is removed."""

_WORD = struct.Struct("@q")


def read_version(head: memoryview) -> int:
    """Returns the version in a segment's header, or ``UPDATING``."""
    version: int = _WORD.unpack_from(head, 0)[0]
    return version


def write_version(head: memoryview, version: int) -> None:
    """Stores a version, or ``UPDATING``, in a segment's header."""
    store_word(head, version)


PROOF_BYTES, NONCE_BYTES = 32, 16


def session_name(transport_id: str, file: Buffer) -> str:
    """Returns how requests name a shm transport.

    Args:
        transport_id: ``OpenTransportResponse.transport_id``.
        file: The file, or at least its first ``PROOF_BYTES + NONCE_BYTES`` bytes.
    """
    return f"{transport_id}.{bytes(memoryview(file)[PROOF_BYTES : PROOF_BYTES + NONCE_BYTES]).hex()}"


SERVER_FOLDER_PREFIX = "shardwell-"
"""Prefix of the folders in which shard servers create files that trainers map."""

_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Symbolic links are not followed. A FIFO or device that is created after the check does not block."""

_FOLDER_BITS = 0o066
"""Permissions that other users must not have for a folder. They may enter it, to reach a server's socket."""

_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


class UntrustedFileError(PermissionError):
    """A file or folder failed the checks and was not used."""


def open_folder(path: str | os.PathLike[str]) -> int:
    """Opens a folder that only the user of this process can list and write to, and returns its descriptor.

    Raises:
        UntrustedFileError: The path is no folder, belongs to another user, or other users can list it or write to it.
        OSError: The folder cannot be opened.
    """
    name = os.fspath(path)
    return _open(name, os.O_RDONLY | os.O_DIRECTORY, None, _folder_problem)


def open_file(
    path: str | os.PathLike[str],
    *,
    write: bool = False,
    create: bool = False,
    size_bytes: int | None = None,
    folder: int | None = None,
) -> int:
    """Opens a regular file of this user that has no other links, and returns its descriptor.

    Args:
        path: Path of the file, or a name without separators if ``folder`` is given.
        write: Whether to open the file for reading and writing.
        create: Create the file, readable by this user only, if it does not exist. Do not use it for names from peers.
        size_bytes: Expected size. None: any size.
        folder: Descriptor of the folder that contains the file.

    Raises:
        UntrustedFileError: The path is no regular file, belongs to another user, is writable by other users, has other
            links, or has another size.
        OSError: The file cannot be opened.
    """
    name = os.fspath(path)
    if folder is not None and (not name or "/" in name or name in (".", "..")):
        raise UntrustedFileError(errno.EPERM, "expected the plain name of a file, without separators", name)
    flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
    return _open(name, flags, folder, lambda found: _file_problem(found, size_bytes))


def open_in_folder(path: str, *, write: bool = False, size_bytes: int | None = None) -> int:
    """As ``open_file``, for a path from a peer. Also checks the folder, as ``open_folder`` does."""
    parent, _, name = path.rpartition("/")
    folder = open_folder(parent)
    try:
        return open_file(name, write=write, size_bytes=size_bytes, folder=folder)
    finally:
        os.close(folder)


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def server_folder(path: str) -> str:
    """Returns the folder of a file that a shard server offers.

    Raises:
        UntrustedFileError: The path is not absolute and normalized, or the name of its folder lacks
            ``SERVER_FOLDER_PREFIX``.
    """
    pure = PurePosixPath(path)
    if not pure.is_absolute() or str(pure) != path or ".." in pure.parts:
        raise UntrustedFileError(errno.EPERM, "expected an absolute path without '..'", path)
    if not pure.parent.name.startswith(SERVER_FOLDER_PREFIX):
        message = f"expected a file in a shard server's folder, whose name starts with {SERVER_FOLDER_PREFIX!r}"
        raise UntrustedFileError(errno.EPERM, message, path)
    return str(pure.parent)


def file_size(size_bytes: int) -> int:
    """Returns the size of the file for a buffer. Empty files cannot be mapped, so an empty buffer has one byte."""
    return max(size_bytes, 1)


def _open(name: str, flags: int, folder: int | None, problem: Callable[[os.stat_result], str | None]) -> int:
    # The path is also checked before it is opened: opening a device can have side effects, and a socket cannot be
    # opened.
    try:
        _require(name, os.stat(name, dir_fd=folder, follow_symlinks=False), problem)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    descriptor = os.open(name, flags | _SAFE, 0o600, dir_fd=folder)
    try:
        _require(name, os.fstat(descriptor), problem)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require(name: str, found: os.stat_result, problem: Callable[[os.stat_result], str | None]) -> None:
    if (text := problem(found)) is not None:
        raise UntrustedFileError(errno.EPERM, text, name)


def _folder_problem(found: os.stat_result) -> str | None:
    return _owner_problem(found, stat.S_ISDIR, "a folder", _FOLDER_BITS)


def _file_problem(found: os.stat_result, size_bytes: int | None) -> str | None:
    if problem := _owner_problem(found, stat.S_ISREG, "a regular file", 0o022):
        return problem
    if found.st_nlink > 1:
        return f"expected a file with one name, found one with {found.st_nlink} (hard links)"
    if size_bytes is not None and found.st_size != size_bytes:
        return f"expected a file of {size_bytes} bytes, found {found.st_size}"
    return None


def _owner_problem(found: os.stat_result, is_kind: Callable[[int], bool], kind: str, forbidden: int) -> str | None:
    user = os.geteuid()
    if not is_kind(found.st_mode):
        actual = next((name for test, name in _KINDS if test(found.st_mode)), "a device")
    elif found.st_uid != user:
        actual = f"one of user {found.st_uid}"
    elif found.st_mode & forbidden:
        actual = f"one with mode {stat.S_IMODE(found.st_mode):04o}"
    else:
        return None
    access = "list or write to" if forbidden == _FOLDER_BITS else "write to"
    return f"expected {kind} of user {user} that no other user can {access}, found {actual}"


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
        # The socket is blocking: with a timeout of Python, connecting fails while the server has not yet accepted other
        # connections.
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
