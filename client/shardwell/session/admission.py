"""Asks the coordinator to admit a trainer to its run: the ``Join`` rpc."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from shardwell.session.config import JoinConfig
from shardwell.session.coordinator_client import CoordinatorClient
from shardwell.session.polling import poll, retry_and_warn
from shardwell_wire.credentials import MemberCredentials
from shardwell_wire.errors import StaleEpochError, UnauthenticatedError
from shardwell_wire.process_identity import own_identity
from shardwell_wire.protocol_versions import check_chosen, own_versions
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_MAX_ADMISSIONS = 6
"""How often a trainer asks to be admitted, if its membership ends again and again before the start."""


class Admission:
    """Sends the ``Join`` requests of one trainer.

    Args:
        config: Options of the trainer.
        coordinator: The coordinator.
        token: Credentials of the trainer.
        check: Called before each rpc. Raises if the trainer must not join.
        note_placement: Called with the placement of each response.
    """

    def __init__(
        self,
        config: JoinConfig,
        coordinator: CoordinatorClient,
        token: MemberCredentials,
        *,
        check: Callable[[], None],
        note_placement: Callable[[int], None],
    ) -> None:
        self._config, self._coordinator, self._token = config, coordinator, token
        self._check, self._note_placement = check, note_placement
        self._incarnation = ""

    def join(
        self, former: coordinator_pb2.JoinResponse | None = None, *, same: bool = False
    ) -> coordinator_pb2.JoinResponse:
        """Joins the run. Returns when the run has started.

        Args:
            former: The last membership of this process, which joins as the same trainer, with any rank that is free.
            same: True: asks for the state of the membership ``former``. False: starts another one, which replaces it.
        """
        config = self._config
        if not same:
            self._incarnation = uuid.uuid4().hex
        request = coordinator_pb2.JoinRequest(
            run=config.run,
            config=config.run_config(),
            resume=config.resume if former is None else "",
            rewrap=config.rewrap,
            trainer=config.trainer if former is None else former.trainer,
            host=config.host,
            global_rank=config.global_rank if former is None else None,
            world_size=config.world_size,
            incarnation=self._incarnation,
            process=own_identity(),
            protocol=own_versions(),
            run_id="" if former is None else former.run_id,
            replaced_epoch=0 if former is None else former.epoch,
        )
        for left in reversed(range(_MAX_ADMISSIONS)):
            try:
                response = self._send(request)
                break
            except UnauthenticatedError:
                if not self._token.is_member or not left:
                    raise
                # The token has expired. Without it, the coordinator waits until the former membership's lease ends.
                self._token.forget()
                request.replaced_epoch = 0
            except StaleEpochError as error:
                # The membership ended while this trainer waited for the start: the run was rolled back, or the
                # coordinator took this process for ended. Another process that has the name is a DuplicateError.
                if same or not left:
                    raise
                logger.warning("joining run %r again: %s", config.run, error)
                self._incarnation = request.incarnation = uuid.uuid4().hex
        check_chosen(response.protocol_version, self._coordinator.address)
        return response

    def _send(self, request: coordinator_pb2.JoinRequest) -> coordinator_pb2.JoinResponse:
        response: coordinator_pb2.JoinResponse = poll(
            self._call,
            request,
            lambda answer: answer.started,
            what=f"run {self._config.run!r} to start",
            waits=self._config.waits,
            log_level=logging.WARNING,  # the user may have started too few trainers
        )
        return response

    def _call(self, request: Any, timeout_s: float, until_s: float) -> Any:
        self._check()
        call = partial(self._coordinator.call, "Join", request, timeout_s=timeout_s)
        response = retry_and_warn(call, self._config.waits, until_s)
        self._note_placement(response.placement)
        return response
