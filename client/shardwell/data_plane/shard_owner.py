"""The server that owns a shard now, and the repetition of operations that a move of the shard has broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from shardwell.transport.server_connection import ServerConnection
from shardwell_wire.errors import ShardwellError, StaleEpochError

Result = TypeVar("Result")


class Moves(Protocol):
    """Learns from the coordinator which shards have moved, and applies the moves."""

    def settle(self) -> None:
        """Waits until all moves that the coordinator has reported are applied.

        Raises:
            UnavailableError: They could not be applied in time.
        """
        ...

    def require_valid(self) -> None:
        """Raises StaleEpochError if this trainer is no member of the run now."""
        ...


class _NoMoves:
    """The shards never move."""

    def settle(self) -> None:
        """See ``Moves``."""

    def require_valid(self) -> None:
        """See ``Moves``."""


class ShardOwner:
    """The server that owns a shard. All views of the shard share one such object. Thread-safe.

    Attributes:
        server: The present owner. Changed by ``move`` only.

    Args:
        server: The present owner.
        moves: Moves the shard.
    """

    def __init__(self, server: ServerConnection, moves: Moves | None = None) -> None:
        self.server, self._moves = server, moves or _NoMoves()
        self._is_cut_anew = False

    def retire(self) -> None:
        """Marks a shard that does not exist any more, because a rollback has cut its unit anew."""
        self._is_cut_anew = True

    def move(self, server: ServerConnection) -> None:
        """Replaces the owner. Operations that fail at the former owner are repeated at the new one."""
        self.server = server

    def settle(self) -> None:
        """See ``Moves.settle``."""
        self._moves.settle()

    def require_valid(self) -> None:
        """See ``Moves.require_valid``."""
        self._moves.require_valid()

    def run(self, action: Callable[[ServerConnection], Result], *, member: bool = True) -> Result:
        """Runs an operation at the owner. Repeats it if it fails and the shard has another owner by then.

        Args:
            action: The operation. It may be repeated.
            member: Whether to repeat it only while this trainer is a member of the run.

        Raises:
            ShardwellError: The operation's error at the present owner.
            StaleEpochError: This trainer is no member of the run now. Every rollback ends its membership.
        """
        while True:
            server = self.server
            try:
                return action(server)
            except ShardwellError as error:
                if self.server is server:
                    self._moves.settle()
                if self._is_cut_anew:
                    self._moves.require_valid()
                    raise StaleEpochError(f"the run was rolled back, and the shard was cut anew: {error}") from error
                if self.server is server:
                    raise
            if member:
                self._moves.require_valid()
