"""Opens the storage of a path or URL, and says which ones a server may open.

Note: [Folders that a trainer names]
    The coordinator and the shard servers open the folders that trainers name, with their own permissions. The operator
    names folders (``--checkpoint-root``), and a server opens only what is below one of them: in a cluster with a key
    nothing else, so that a trainer's token opens no other file of the server's host and connects to no other host.
    Every path below a local root is resolved before it is opened, so that a symbolic link does not lead out of it.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from shardwell_wire.checkpoints.storage import LocalStorage, ObjectStorage, Storage
from shardwell_wire.errors import AccessError, InvalidRequestError

ROOT_OPTION, ROOT_VARIABLE = "--checkpoint-root", "SHARDWELL_CHECKPOINT_ROOT"

_ONE_SLASH = re.compile(r"[a-z][a-z0-9+]*:/[^/]")
"""A mistyped URL."""
_PROTOCOLS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "memory": "memory",
}
"""Protocols of URLs other than ``file``, with one name for each kind of storage. fsspec knows many more, which read any
file or connect to any host."""
_MAX_SHOWN, _MAX_LENGTH = 200, 4096
_ANYWHERE = "any"
"""Value of ``--checkpoint-root``: every folder that the process can open."""


def open_storage(url: str | Path) -> Storage:
    """Returns the storage at a path or URL. Creates nothing.

    Raises:
        InvalidRequestError: The URL is not supported on this host: a package is missing, or the protocol is unknown.
    """
    if (path := local_path(str(url))) is not None:
        return LocalStorage(path)
    return ObjectStorage(str(url))


class CheckpointRoots:
    """The folders below which a server may open checkpoints. See Note: [Folders that a trainer names].

    Args:
        roots: Absolute paths and URLs. None: every folder.
        is_server: True if the server is a process of its own, where ``memory:`` would be another place than for the
            other servers.

    Raises:
        ValueError: A root is neither an absolute path nor a URL that ``open_storage`` supports.
    """

    def __init__(self, roots: Sequence[str] | None = None, *, is_server: bool = False) -> None:
        for root in roots or ():
            if "://" not in root and not os.path.isabs(root):
                raise ValueError(
                    f"{ROOT_OPTION} {root!r}: expected an absolute path, or a URL such as s3://bucket/folder"
                )
            try:
                local_path(root)
            except InvalidRequestError as error:
                raise ValueError(f"{ROOT_OPTION}: {error}") from error
        self._roots = None if roots is None else tuple(roots)
        self._is_server = is_server

    @classmethod
    def from_option(cls, option: str, *, is_protected: bool) -> CheckpointRoots:
        """Returns the roots that an operator has named.

        Args:
            option: Paths and URLs, separated by commas; or ``any``. Empty: none was named, so a cluster without a key
                opens every folder, and one with a key opens none.
            is_protected: Whether the cluster has a key.

        Raises:
            ValueError: See above.
        """
        roots = [part.strip() for part in option.split(",") if part.strip()]
        if _ANYWHERE in roots or not (roots or is_protected):
            return cls(is_server=True)
        return cls(roots, is_server=True)

    def open(self, url: str) -> Storage:
        """Returns the storage at a path or URL, which then opens nothing outside of the root. Creates nothing.

        Raises:
            AccessError: The folder is not below a root.
            InvalidRequestError: See ``open_storage``.
        """
        path = local_path(url)
        if self._is_server and url.startswith("memory:"):
            raise InvalidRequestError(
                f"checkpoint folder {_shown(url)}: memory: is the memory of one process. Name a folder or a bucket "
                "that the coordinator and all shard servers reach"
            )
        if self._roots is None:
            return open_storage(url)
        if path is not None:
            path = Path(os.path.normpath(path))
            for root in filter(None, map(local_path, self._roots)):
                resolved = Path(os.path.realpath(root))
                if path.is_relative_to(root) or path.is_relative_to(resolved):
                    return LocalStorage(path, resolved)
        elif any(_is_below(url, root) for root in self._roots):
            return open_storage(url)
        raise AccessError(self._refusal(url), url=url)

    def _refusal(self, url: str) -> str:
        where = f"the option {ROOT_OPTION} ({ROOT_VARIABLE}) of the coordinator and of all shard servers"
        if not self._roots:
            return (
                f"checkpoint folder {_shown(url)}: this cluster has tokens, and its operator has named no folder for "
                f"checkpoints. Ask the operator to name one with {where}, such as {ROOT_OPTION} /checkpoints or "
                f"{ROOT_OPTION} s3://bucket/folder"
            )
        return (
            f"checkpoint folder {_shown(url)} is not below {' or '.join(self._roots)}: name a folder below it, or ask "
            f"the operator to change {where}"
        )


def _shown(url: str) -> str:
    return repr(url if len(url) <= _MAX_SHOWN else f"{url[:_MAX_SHOWN]}...")


def _is_below(url: str, root: str) -> bool:
    """Returns whether a URL of a bucket is a folder below another one, or this folder itself."""
    if "://" not in root:
        return False
    (kind, rest), (root_kind, root_rest) = (each.rstrip("/").split("://", maxsplit=1) for each in (url, root))
    parts = rest.split("/")
    is_plain = not {"", ".", ".."} & set(parts) and not set("?#\\") & set(rest)
    is_inside = rest == root_rest or rest.startswith(f"{root_rest}/")
    return is_plain and is_inside and _PROTOCOLS.get(kind) == _PROTOCOLS.get(root_kind)


def local_path(url: str) -> Path | None:
    """Returns the local path that a path or ``file:`` URL means; None for URLs of buckets.

    Raises:
        InvalidRequestError: The URL is empty or too long, has an unknown protocol, or chains several.
    """
    if not 0 < len(url) <= _MAX_LENGTH or not url.isprintable():
        raise InvalidRequestError(
            f"checkpoint folder {_shown(url)}: expected a path or a URL such as s3://bucket/folder, of at most "
            f"{_MAX_LENGTH} printable characters"
        )
    if _ONE_SLASH.match(url):
        raise InvalidRequestError(
            f"checkpoint folder {_shown(url)}: a URL has two slashes after its protocol, such as s3://bucket/folder. "
            f"The local folder of this name is ./{url}"
        )
    for prefix in ("file://", "local://"):
        if url.startswith(prefix) and "::" not in url:
            return Path(url.removeprefix(prefix)).absolute()
    if "://" not in url and "::" not in url:
        return Path(url).expanduser().absolute()
    if "::" in url or url.split("://", maxsplit=1)[0] not in _PROTOCOLS:
        raise InvalidRequestError(
            f"checkpoint folder {_shown(url)}: expected a path, or a URL that starts with file://, s3://, gs:// or "
            "az://, without '::'"
        )
    return None


def absolute(url: str | Path) -> str:
    """Returns a path or URL that means the same in other working directories. Raises as ``local_path``."""
    path = local_path(str(url))
    return str(url) if path is None else str(path)


def check_writable(storage: Storage) -> None:
    """Writes and removes a small file, so that a folder that cannot be written is reported early.

    Raises:
        ShardwellError: See ``Storage``.
    """
    name = f".probe-{uuid.uuid4().hex}"
    storage.make_folder("")
    storage.write_whole(name, b"shardwell")
    storage.delete(name)
