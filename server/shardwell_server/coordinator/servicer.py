"""gRPC servicer of ``CoordinatorService``. ``rpcs/`` has its rpcs, one file per topic."""

from __future__ import annotations

from shardwell_server.coordinator.rpcs.operators import AdministrationRpcs, InspectionRpcs
from shardwell_server.coordinator.rpcs.rendezvous_rpcs import RendezvousRpcs
from shardwell_server.coordinator.rpcs.server_rpcs import ServerRpcs
from shardwell_server.coordinator.rpcs.step_rpcs import StepRpcs
from shardwell_server.coordinator.rpcs.trainer_rpcs import DeclarationRpcs, TrainerRpcs


class CoordinatorServicer(
    ServerRpcs, TrainerRpcs, DeclarationRpcs, RendezvousRpcs, StepRpcs, AdministrationRpcs, InspectionRpcs
):
    """Serves the rpcs of the coordinator. Arguments as those of ``CoordinatorRpcs``."""

    def run_id_of(self, name: str) -> str:
        """Returns the id of the run that has a name now. Empty: there is none."""
        run = self._state.runs.get(name)
        return "" if run is None else run.identity.run_id
