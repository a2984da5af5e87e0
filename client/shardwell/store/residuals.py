"""Residuals of error feedback in checkpoints: each trainer writes its own, and continues with those of its ranks.

Note: [Residuals in checkpoints]
    The shard servers never see residuals. A checkpoint of version v therefore wants a file of every trainer with error
    feedback. The residuals at the start of step v belong to it. They exist until the commit of step v, which cannot
    happen before the checkpoint has begun. The coordinator asks over the membership stream, and once more in the
    response to that commit: the trainer captures its residuals before it moves to the next step. Capturing copies
    nothing. A background thread writes the file, and training does not wait for it.

    A trainer that dies, or cannot write to the folder, leaves its ranks without residuals: the checkpoint is complete
    without them, an event names the ranks, and a run that is loaded from it starts with zeros for them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from shardwell.data_plane.error_feedback import CapturedResiduals
from shardwell.membership.membership import Membership
from shardwell.store.item_pushes import ItemPushes
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan, Piece, residual_state
from shardwell_wire.checkpoints.manifest import RESIDUAL_RANKS
from shardwell_wire.checkpoints.reading import Checkpoint, pieces_of, read_elements
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import ShardwellError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 10.0
"""How long a trainer that leaves the run writes to a checkpoint."""
_ASK_AGAIN_S = 0.05
"""Pause until a checkpoint that is about to begin is looked for again."""


class RestoredResiduals:
    """The residuals in a checkpoint.

    Args:
        url: The checkpoint.
        world: The grid of the run.
        pp_rank: Pipeline rank of this trainer.

    Raises:
        ShardwellError: The checkpoint is damaged, or cannot be reached from this host.
    """

    def __init__(self, url: str, world: World, pp_rank: int) -> None:
        self._checkpoint, self._pp_rank = Checkpoint.open(url), pp_rank
        manifest = self._checkpoint.manifest
        self.has_same_ranks = manifest.world.dp == world.dp
        """Whether the checkpoint has the run's data ranks. Otherwise its residuals belong to other batches."""
        self.dp_ranks = frozenset(manifest.extra.get(RESIDUAL_RANKS, ()) if self.has_same_ranks else ())
        """Ranks whose residuals the checkpoint has."""
        self._stages = {name: unit.pp_ranks for unit in self._checkpoint.units for name in unit.index_by_name}
        """Pipeline ranks that push each parameter in the checkpoint, by name and alias."""

    def __call__(self, dp_rank: int, layout: UnitLayout) -> Mapping[int, torch.Tensor]:
        """Returns the residuals of a rank by parameter index, each [numel]. Logs what cannot be read."""
        found = {}
        for index, parameter in enumerate(layout.parameters if self.has_same_ranks else ()):
            try:
                stages = self._read_stages(dp_rank, parameter, self._stages_to_add(parameter, layout))
            except ShardwellError as error:
                logger.warning("push_error_feedback: data rank %d starts with zeros: %s", dp_rank, error)
                continue
            if stages:
                found[index] = sum(stages[1:], stages[0])
        return found

    def _stages_to_add(self, parameter: Parameter, layout: UnitLayout) -> Sequence[int | None]:
        """Returns the pipeline ranks of the checkpoint whose residuals this trainer continues with. None: any.

        If other stages share the parameter than in the checkpoint, the first one gets the sum, which loses no residual.
        """
        names = (parameter.name, *parameter.aliases)
        former = next((self._stages[name] for name in names if name in self._stages), layout.pp_ranks)
        if len(former) == len(layout.pp_ranks) == 1:
            return [None]
        if former == layout.pp_ranks:
            return [self._pp_rank]
        if self._pp_rank != layout.pp_rank:
            return []
        return list(former) if len(former) > 1 else [None]

    def _read_stages(
        self, dp_rank: int, parameter: Parameter, pp_ranks: Iterable[int | None]
    ) -> Sequence[torch.Tensor]:
        """Returns the residuals of a parameter in each stage that has them. Each [numel]"""
        found = []
        for pp_rank in pp_ranks:
            stored = list(pieces_of(self._checkpoint, parameter, residual_state(dp_rank, pp_rank), 0, parameter.numel))
            if stored:
                values = torch.zeros(parameter.numel, dtype=torch.float32, device="cpu")
                memory = memory_at(values.data_ptr(), values.nbytes, values)
                read_elements(self._checkpoint, parameter, stored, (0, parameter.numel), memory)
                found.append(values)
        return found


class CheckpointResiduals:
    """Writes this trainer's residuals to checkpoints. See Note: [Residuals in checkpoints].

    Args:
        membership: The membership of this trainer.
        pushes: Has the residuals.
    """

    def __init__(self, membership: Membership, pushes: ItemPushes) -> None:
        self._membership, self._pushes = membership, pushes
        self._lock = threading.Lock()
        self._answered = ""
        """Id of the newest checkpoint for which the residuals were captured."""
        self._early: coordinator_pb2.WantedResiduals | None = None
        """A checkpoint of a step that this trainer has not started."""
        self._thread: threading.Thread | None = None
        membership.when_residuals_wanted = self.note_wanted

    def restore(self, url: str, dp_ranks: Collection[int]) -> None:
        """Continues with the residuals of a checkpoint. Called when this trainer has joined at the checkpoint's step.

        Args:
            url: The checkpoint. Empty: there is none.
            dp_ranks: The data ranks that this trainer plays.
        """
        feedback = self._pushes.feedback
        if feedback is None or not feedback.step:
            return
        missing, reason = sorted(dp_ranks), "no checkpoint has this step"
        if url:
            try:
                restored = RestoredResiduals(url, self._membership.world, self._membership.pp_rank)
            except ShardwellError as error:
                reason = str(error)
            else:
                feedback.restore(restored)
                missing = sorted(set(dp_ranks) - restored.dp_ranks)
                reason = f"checkpoint {url} {'lacks them' if restored.has_same_ranks else 'has other data ranks'}"
        if missing or (not dp_ranks and not url):
            logger.warning(
                "push_error_feedback: the rounding errors of pushes before step %d are not known to this trainer, so "
                "the weights get other bits than in an undisturbed run: %s",
                feedback.step,
                reason,
            )

    def note_wanted(self, wanted: coordinator_pb2.WantedResiduals) -> None:
        """Starts to write the residuals that the coordinator wants. Thread-safe; returns at once."""
        with self._lock:
            feedback = self._pushes.feedback
            if feedback is None or wanted.checkpoint_id in ("", self._answered):
                return
            if feedback.step < wanted.step:
                self._early = wanted
                return
            self._early, self._answered = None, wanted.checkpoint_id
            captured = feedback.capture(wanted.step)
            thread = threading.Thread(
                target=self._save, args=(wanted, captured), name="shardwell-residuals", daemon=True
            )
            thread.start()  # before ``finish``, in another thread, can see and join it
            self._thread = thread

    def start_step(self) -> None:
        """Called when this trainer has started the next step."""
        if (early := self._early) is not None:
            self.note_wanted(early)

    def finish(self) -> None:
        """Writes what a checkpoint of the last step wants. Called before this trainer leaves the run."""
        feedback, give_up = self._pushes.feedback, time.monotonic() + _CLOSE_LIMIT_S
        while feedback is not None and feedback.step and time.monotonic() < give_up:
            wanted = self._membership.ask_residuals()
            if wanted is None or wanted.step != feedback.step:
                break
            if wanted.checkpoint_id:
                self.note_wanted(wanted)
                break
            time.sleep(_ASK_AGAIN_S)
        if (thread := self._thread) is not None:
            thread.join(max(0.0, give_up - time.monotonic()))

    # ---- in the thread ----

    def _save(self, wanted: coordinator_pb2.WantedResiduals, captured: CapturedResiduals | None) -> None:
        request = coordinator_pb2.AddResidualsRequest(
            context=self._membership.context(wanted.step),
            trainer=self._membership.trainer,
            checkpoint_id=wanted.checkpoint_id,
        )
        name = f"residuals-{self._membership.epoch}.safetensors"
        try:
            if captured is not None and captured.residuals:
                request.file_json = self._write(wanted, captured, name)
            request.dp_ranks.extend(sorted(captured.dp_ranks) if captured is not None else ())
        except ShardwellError as error:
            request.error = str(error)
        except Exception as error:
            logger.exception("unexpected error while residuals were written")
            request.error = f"{type(error).__name__}: {error}"
        if request.error:
            logger.warning("the residuals were not written to checkpoint %s: %s", wanted.url, request.error)
        try:
            self._membership.call("AddResiduals", request)
        except ShardwellError as error:
            logger.info("checkpoint %s does not contain this trainer's residuals: %s", wanted.url, error)
            with self._lock:
                if self._answered == wanted.checkpoint_id:
                    self._answered = ""  # the coordinator may ask again, such as after this trainer has joined again
            # The file stays: the coordinator may have received the report, and then the manifest names it.

    def _write(self, wanted: coordinator_pb2.WantedResiduals, captured: CapturedResiduals, name: str) -> str:
        """Writes the file. Returns its entry in the manifest."""
        pieces = [
            Piece(
                at.parameter,
                residual_state(at.dp_rank, self._membership.pp_rank if at.in_stages else None),
                0,
                at.values.numel(),
                "float32",
                (at.values.numel(),),
            )
            for at in captured.residuals
        ]
        plan = FilePlan(pieces, [], run_id=self._membership.identity.run_id, step=captured.step)
        writer = CheckpointFileWriter(open_storage(wanted.url), f"trainer-{self._membership.epoch}", plan, name=name)
        try:
            for piece, at in zip(pieces, captured.residuals, strict=True):
                writer.write(piece, memory_at(at.values.data_ptr(), at.values.nbytes, at.values))
            return json.dumps(writer.finish().to_dict())
        except BaseException:
            writer.abort()
            raise
