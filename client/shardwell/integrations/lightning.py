"""A strategy of Lightning for a ``LightningModule`` whose model ``fully_shard`` or ``auto_wrap`` has sharded.

Lightning counts batches, validates, logs and saves. Each of its optimizer steps is one step of the session, which
``optimizer_step`` computes and commits as a whole: the session decides which work items this trainer computes, so that
it can also compute those of a lost trainer. Lightning's own loader has empty batches. The state of the loops and
callbacks is tracked. A trainer that joins later starts there, as if it resumed from a checkpoint of Lightning.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch import __version__ as lightning_version
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as error:
    raise ImportError(f"shardwell.integrations.lightning cannot import {error.name}: pip install lightning") from error

from shardwell import optim
from shardwell.integrations import check_session, decode_state, encode_state, refuse_resuming, refuse_unknown_steps
from shardwell.integrations.item_batches import WorkItemBatches
from shardwell.module.fully_shard import ShardedModule
from shardwell.session.session import Session
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import StepRestartedError, UsageError


class ShardwellStrategy(SingleDeviceStrategy):
    """Trains a ``LightningModule`` with one optimizer of ``shardwell.optim``: ``Trainer(strategy=..., devices=1)``.

    Args:
        session: The session that has sharded the model.
        device: The device on which the model is. Default: ``session.device()``.
        options: Other arguments of ``SingleDeviceStrategy``.

    Attributes:
        means: Means over the data ranks of the numbers of the last step: ``loss``.
    """

    strategy_name = "shardwell"
    handles_gradient_accumulation = True
    lightning_restore_optimizer = False

    def __init__(self, session: Session, device: Any = None, **options: Any) -> None:
        super().__init__(device or session.device(), **options)
        check_session(session)
        self.means: Any = {}
        self._session = session
        self._steps: Any = None
        self._num_steps = 0
        self._batches: WorkItemBatches | None = None
        self._workers: dict[str, Any] = {}
        self._tracked: _TrackedLoops | None = None
        self._batch: Any = None
        self._rank_before = rank_zero_only.rank
        self._set_duties(session.global_rank == 0)

    @property
    def is_global_zero(self) -> bool:
        """True if this trainer has acted for rank 0 in the last step. See ``Step.global_ranks``."""
        return self._plays_rank_0

    def _set_duties(self, plays_rank_0: bool) -> None:
        self._plays_rank_0 = plays_rank_0
        rank_zero_only.rank = 0 if plays_rank_0 else 1

    def setup_environment(self) -> None:
        """Makes functions with ``rank_zero_only`` run in the trainer of rank 0, until ``teardown``."""
        self._set_duties(self._plays_rank_0)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Makes the optimizer, and restores the state of the loops if the run has committed steps.

        Raises:
            UsageError: The module or an argument of the Trainer does not fit. The message says what to do.
        """
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        if not self.lightning_module.automatic_optimization:
            raise UsageError(
                "the LightningModule has automatic_optimization=False, but this strategy steps the optimizer itself: "
                "leave it True, or write a training loop over session.steps without Lightning"
            )
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], optim.ShardedOptimizer):
            raise UsageError(
                f"configure_optimizers returned {[type(each).__name__ for each in self.optimizers]}: expected one of "
                "shardwell.optim, or shardwell.ClientSide for an optimizer of your own"
            )
        self.precision_plugin.clip_gradients = self._clip_gradients
        tracked = self._tracked = _TrackedLoops(trainer, self.optimizers[0])
        self._session.track(lightning=tracked)
        if tracked.restored is not None:
            trainer._checkpoint_connector._loaded_checkpoint = tracked.restored
            trainer._checkpoint_connector.restore_callbacks()  # Lightning restores the rest after this call
        elif self._session.step:
            refuse_unknown_steps(self._session)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Refuses to load weights into a sharded model."""
        refuse_resuming(f"ckpt_path={str(checkpoint_path)!r}", "fit()")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader of empty batches instead of the training loader, and any other loader as it is."""
        trainer = self.lightning_module.trainer
        if trainer.state.fn != "fit" or not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
            raise UsageError(
                f"the training loader is a {type(dataloader).__name__}: any trainer may have to compute any batch, so "
                "pass a DataLoader whose dataset has __len__ and __getitem__"
            )
        if dataloader.batch_sampler is None:
            raise UsageError(
                "the training loader has batch_size=None, so it has no batches to divide among the data ranks: pass a "
                "DataLoader with a batch_size or a batch_sampler"
            )
        if isinstance(trainer.limit_train_batches, int) or trainer.limit_train_batches < 1 or trainer.overfit_batches:
            raise UsageError(
                "limit_train_batches and overfit_batches would divide the run's steps into other epochs than the "
                "data: pass a DataLoader of a torch.utils.data.Subset of the dataset"
            )
        dp, seed, accumulation = self._session.world.dp, self._session.seed, trainer.accumulate_grad_batches
        shards = [_Shard(dataloader.batch_sampler, dp, rank) for rank in range(dp)]
        self._batches = WorkItemBatches(dataloader, shards, accumulation, seed=seed, sampler_seed=seed)
        workers = dataloader.num_workers
        self._workers = {"num_workers": workers, "prefetch": dataloader.prefetch_factor} if workers else {}
        return _EmptyBatches(self._batches.steps_per_epoch * accumulation)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's ``training_step`` with the micro-batch that ``optimizer_step`` computes."""
        output = super().training_step(self._batch, *args, **kwargs)
        if output is None or (isinstance(output, dict) and output.get("loss") is None):
            raise UsageError(
                f"{type(self.lightning_module).__name__}.training_step returned no loss: all data ranks take part in "
                "each step, so none can skip a batch. Return the loss; to skip a batch, return a loss of zero, such as "
                "0 * loss"
            )
        return output

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> None:
        """Computes and commits a step of the run in the call for its last micro-batch."""
        module = self.lightning_module
        trainer = module.trainer
        closure._result = ClosureResult(closure_loss=None)
        if trainer.fit_loop._should_accumulate():
            return
        if self._steps is None:
            if len(trainer.fit_loop._combined_loader.flattened) != 1:
                raise UsageError("the module has several training loaders: return one, with a dataset of all samples")
            most = trainer.estimated_stepping_batches
            self._num_steps = sys.maxsize if math.isinf(most) else int(most)
            self._steps = self._session.steps(self._num_steps)
        optimizer.repeats = True
        while optimizer.repeats:
            step: Any = next(self._steps, None)
            if step is None or step.number != trainer.global_step:
                raise StepRestartedError(
                    f"the run is at step {self._session.step}, and Lightning's loops are at {trainer.global_step}: "
                    "start this trainer again, such as by shardwell launch --restart 3"
                )
            assert self._tracked is not None
            self._tracked.restored = None  # the loops are there
            for batches in step.batches(self._batches, **self._workers):
                if not self._session.in_flight.state.require_current().is_over:  # Lightning would log its losses
                    step.log(loss=sum(self._compute(module, batches, closure)) / len(batches))
            self.precision_plugin._after_closure(module, optimizer)
            optimizer.step()
            self._tracked.restored = None  # a repeated step has restored it
        self._set_duties(0 in step.global_ranks)
        self.means = step.means
        trainer.fit_loop.epoch_loop._batches_that_stepped = step.number  # a restart may have counted it twice

    def _compute(self, module: LightningModule, batches: list[Any], closure: Callable[[], Any]) -> Iterator[Any]:
        """Computes the micro-batches of a work item, and yields their losses."""
        trainer = module.trainer
        for index, batch in enumerate(batches):
            converted = trainer.precision_plugin.convert_input(batch)
            changed = module._on_before_batch_transfer(converted, dataloader_idx=0)
            self._batch = self.batch_to_device(changed, dataloader_idx=0)
            trainer._results.batch, trainer._results.batch_size = self._batch, None
            with ExitStack() as stack:
                for part in module.children() if index < len(batches) - 1 else ():
                    if isinstance(part, ShardedModule):
                        stack.enter_context(part.no_sync())
                yield closure()

    def _clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val and gradient_clip_algorithm == "value":
            self.optimizers[0].clip_grad_value_(clip_val)
        elif clip_val:
            self.optimizers[0].clip_grad_norm_(clip_val)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights of the trainer's step in the trainer of rank 0, for checkpoints of Lightning."""
        return full_state_dict(self.lightning_module) if self._plays_rank_0 else {}

    def teardown(self) -> None:
        """Ends the loop over the session's steps."""
        steps, self._steps = self._steps, None
        try:
            if steps is not None and self.lightning_module.trainer.global_step >= self._num_steps:
                next(steps, None)
        finally:
            if steps is not None:
                steps.close()
            rank_zero_only.rank = self._rank_before
            super().teardown()


class _EmptyBatches:
    """A loader that Lightning may resume anywhere."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{} for _ in range(self._length)])

    def state_dict(self) -> dict[str, Any]:
        """Has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has no state."""


class _Shard:
    """The batches of one data rank: every dp-th one. The first batches follow the last ones if they are too few."""

    def __init__(self, whole: Any, dp: int, dp_rank: int) -> None:
        self._whole, self._dp, self._dp_rank = whole, dp, dp_rank

    def __len__(self) -> int:
        return math.ceil(len(self._whole) / self._dp)

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(self._whole)
        return iter([batches[index % len(batches)] for index in range(self._dp_rank, len(self) * self._dp, self._dp)])


class _TrackedLoops:
    """The state of Lightning's loops, callbacks and schedules that the run stores with every commit.

    Args:
        optimizer: The optimizer, whose hyper-parameters are stored, too.
    """

    def __init__(self, trainer: Trainer, optimizer: Any) -> None:
        self._trainer, self.optimizer = trainer, optimizer
        self._schedules = trainer.lr_scheduler_configs  # a second fit() makes others
        self.restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state before the batch in whose midst the step is committed. Lightning repeats the batch."""
        if self.restored is not None:
            return dict(encode_state(self.restored))
        trainer = self._trainer
        loops = trainer._checkpoint_connector._get_loops_state_dict()
        state = {
            "pytorch-lightning_version": lightning_version,
            "loops": {"fit_loop": loops["fit_loop"]},
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [config.scheduler.state_dict() for config in self._schedules],
        }
        _forget_open(state["loops"])
        encoded: dict[str, Any] = encode_state(state)
        return encoded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state for ``setup``."""
        self.restored = decode_state(state)


def _forget_open(loops: dict[str, Any]) -> None:
    """Resets the counts of the batch and the optimizer step in flight, so that Lightning repeats them."""
    batches = loops["fit_loop"]["epoch_loop.batch_progress"]
    steps = loops["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    for counts in (batches["total"], batches["current"], steps["total"], steps["current"]):
        counts.update(dict.fromkeys(counts, counts["completed"]))
