"""Opens the storage of a path or URL."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from shardwell_wire.checkpoints.local_storage import LocalStorage
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import InvalidRequestError

_ONE_SLASH = re.compile(r"[a-z][a-z0-9+]*:/[^/]")
"""A mistyped URL."""


def open_storage(url: str | Path) -> Storage:
    """Returns the storage at a path or URL. Creates nothing.

    Raises:
        InvalidRequestError: The URL is not supported on this host: a package is missing, or the protocol is unknown.
    """
    text = str(url)
    if not text or "\0" in text:
        raise InvalidRequestError(f"checkpoint folder {text!r}: expected a path or a URL such as s3://bucket/folder")
    if (path := local_path(text)) is not None:
        return LocalStorage(path)
    from shardwell_wire.checkpoints.object_storage import ObjectStorage

    return ObjectStorage(text)


def local_path(url: str) -> Path | None:
    """Returns the local path that a path or ``file:`` URL means; None for other URLs.

    Raises:
        InvalidRequestError: The URL has one slash after its protocol.
    """
    if _ONE_SLASH.match(url):
        raise InvalidRequestError(
            f"checkpoint folder {url!r}: a URL has two slashes after its protocol, such as s3://bucket/folder. The "
            f"local folder of this name is ./{url}"
        )
    for prefix in ("file://", "local://"):
        if url.startswith(prefix):
            return Path(url.removeprefix(prefix)).absolute()
    return None if "://" in url or "::" in url else Path(url).expanduser().absolute()


def absolute(url: str | Path) -> str:
    """Returns a path or URL that means the same in other working directories. Raises as ``local_path``."""
    path = local_path(str(url))
    return str(url) if path is None else str(path)


def check_writable(url: str | Path) -> None:
    """Writes and removes a small file, so that a folder that cannot be written is reported early.

    Raises:
        ShardwellError: See ``Storage`` and ``open_storage``.
    """
    storage, name = open_storage(url), f".probe-{uuid.uuid4().hex}"
    storage.make_folder("")
    storage.write_whole(name, b"shardwell")
    storage.delete(name)
