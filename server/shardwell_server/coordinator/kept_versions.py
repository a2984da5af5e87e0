"""The older versions of a run that readers can read: published ones, and the last ones before the newest.

The coordinator decides which versions the servers keep, and names them in each ``Update``. The servers reserve memory
for ``RunSettings.keep_versions`` of them, so training never needs this memory.
"""

from __future__ import annotations

import json

from shardwell_wire.errors import CapacityError, InvalidRequestError, NotFoundError, VersionGoneError

_MAX_NAME = 200


class KeptVersions:
    """Which versions a run keeps besides the newest.

    Args:
        run: Name of the run, for errors.
        limit: ``RunSettings.keep_versions``.
    """

    def __init__(self, run: str, limit: int) -> None:
        self._run, self._limit = run, limit
        self.names: dict[str, int] = {}
        """Published versions by name."""

    def before(self, newest: int) -> list[int]:
        """Returns the versions that are kept while ``newest`` is the newest version, in order.

        Published versions use the same memory: with each of them, one unpublished version less is kept.
        """
        named = {version for version in self.names.values() if version < newest}
        others = [version for version in range(max(0, newest - self._limit), newest) if version not in named]
        free = self._limit - len(named)
        return sorted({*named, *others[len(others) - free :]}) if free > 0 else sorted(named)

    def check_kept(self, version: int, newest: int) -> None:
        """Raises VersionGoneError if a version is older than ``newest`` and is not kept."""
        if version >= newest or version in (kept := self.before(newest)):
            return
        listed = ", ".join(map(str, kept))
        older = f", and it keeps {listed}" if kept else " and keeps no older ones"
        raise VersionGoneError(
            f"run {self._run!r} is at version {newest}{older}: version {version} is no longer available. "
            "join(keep_versions=N) keeps more",
            version=version,
            newest=newest,
            kept=listed,
        )

    def publish(self, name: str, version: int, newest: int) -> None:
        """Names a version.

        Raises:
            InvalidRequestError: The name is empty, too long or not printable.
            VersionGoneError: The version is not kept any more.
            CapacityError: All versions that the run keeps are published under other names.
        """
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise InvalidRequestError(f"name={name!r}: expected 1 to {_MAX_NAME} printable characters")
        self.check_kept(version, newest)
        used = {published for other, published in self.names.items() if other != name} | {version}
        if len(used) > self._limit:
            names = ", ".join(sorted(repr(other) for other in self.names if other != name))
            taken = f", and all are published: {names}. Remove one (shardwell publish --remove)" if names else ""
            raise CapacityError(
                f"run {self._run!r} keeps {self._limit} older versions{taken}: create the run with "
                f"join(keep_versions={len(used)}) to keep more",
                run=self._run,
            )
        self.names[name] = version

    def remove(self, name: str) -> int:
        """Removes a name. Returns the version. Raises NotFoundError if no version has it."""
        self.find(name)
        return self.names.pop(name)

    def find(self, name: str) -> int:
        """Returns the version that is published under a name. Raises NotFoundError if there is none."""
        if name not in self.names:
            known = ", ".join(sorted(map(repr, self.names))) or "none"
            raise NotFoundError(f"run {self._run!r} has no version {name!r}; published versions: {known}", name=name)
        return self.names[name]

    def clear(self) -> list[str]:
        """Removes all names, because the run was loaded from a checkpoint. Returns them."""
        names, self.names = sorted(self.names), {}
        return names

    def to_json(self) -> str:
        """Returns the names as text, for ``restore``."""
        return json.dumps(self.names)

    def restore(self, text: str) -> None:
        """Restores the names after a coordinator restart."""
        self.names = json.loads(text) if text else {}
