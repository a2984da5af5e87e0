"""Hugging Face's ``Trainer`` for a model that ``fully_shard`` or ``auto_wrap`` has sharded.

The Trainer counts steps, evaluates, logs and saves. Each of its optimizer steps is one step of the session, which
``training_step`` computes and commits as a whole: the session decides which work items this trainer computes, so that
it can also compute those of a lost trainer. The state of the Trainer, such as its schedule and its callbacks, is
tracked. A trainer that joins later starts there, as if it resumed from a checkpoint of the Trainer.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from contextlib import nullcontext
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

try:
    import transformers
    from accelerate.data_loader import BatchSamplerShard
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(
        f"shardwell.integrations.transformers cannot import {error.name}: pip install 'transformers[torch]>=5'"
    ) from error

from shardwell import optim
from shardwell.integrations import (
    check_session,
    decode_state,
    encode_state,
    refuse_resuming,
    refuse_unknown_steps,
    single_process,
)
from shardwell.integrations.item_batches import WorkItemBatches
from shardwell.session.session import Session, session_of
from shardwell.training.training_step import Step
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import StepRestartedError, StepStateError, UsageError

logger = logging.getLogger(__name__)

_REFUSED = {
    "fp16": "losses would need a GradScaler of Shardwell. Use bf16=True",
    "load_best_model_at_end": "the weights of the run are on the shard servers. Load the folder "
    "trainer.state.best_model_checkpoint into another model after the training",
    "auto_find_batch_size": "all trainers of the run need the same batch size",
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), "the shard servers shard the model"),
}
"""Arguments that must be off, and what to do instead."""


class TrainingArguments(transformers.TrainingArguments):
    """The arguments of a Trainer that takes this process for the only one, also under a launcher.

    Each trainer computes on the GPU with the number LOCAL_RANK, as ``session.device()``, or on the only one it sees.
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        with single_process():
            device: torch.device = super()._setup_devices
        if device.type == "cuda":
            self._n_gpu = 1  # several would divide each batch
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
            torch.cuda.set_device(device)
        return device


class Trainer(transformers.Trainer):
    """A Trainer whose optimizer steps are the steps of a Shardwell run.

    Also a mixin for subclasses of the Trainer: ``class MyTrainer(Trainer, Seq2SeqTrainer)``. Arguments as in
    Transformers. Without ``optimizers``, ``args.optim`` chooses the optimizer of ``shardwell.optim``.

    Raises:
        UsageError: The model is not sharded, or an argument does not fit. The message says what to do.
    """

    control: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, model: Any = None, args: Any = None, *others: Any, **options: Any) -> None:
        self._session = _session_of(model)
        self._plays_rank_0 = self._session.global_rank == 0
        self._sharded: Any = None
        self._steps: Any = None
        self._batches: Any = None
        self._norm: float | None = None
        self._tracked = _TrackedTrainer(self)
        super().__init__(model, args or TrainingArguments("tmp_trainer"), *others, **options)
        for name, reason in _REFUSED.items():
            if getattr(self.args, name, None):
                raise UsageError(f"TrainingArguments({name}=...) does not work with Shardwell: {reason}")
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise UsageError(
                f"the TrainingArguments found {max(self.args.world_size, self.args.n_gpu)} processes or GPUs, among "
                "which the Trainer would divide the batches: use shardwell.integrations.transformers."
                "TrainingArguments, and start the trainers with `shardwell launch`"
            )

    # ---- the loop ----

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Trains up to step ``max_steps`` of the run, from its committed step. See ``transformers.Trainer.train``.

        Raises:
            UsageError: ``resume_from_checkpoint`` is set, or the steps of the run were not committed by a Trainer.
        """
        if resume_from_checkpoint:
            refuse_resuming("train(resume_from_checkpoint=...)", "train()")
        self.create_optimizer()
        former = None
        while True:
            state = self._start_state()
            max_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
            if self._batches is None:
                raise UsageError(
                    f"{type(self).__name__}.get_train_dataloader hides that of shardwell.integrations.transformers."
                    "Trainer: let it be a method of another class, class MyTrainer(Trainer, ThatClass)"
                )
            if state and state["state"]["global_step"] >= max_steps:
                logger.warning("run %r has %d steps already: train() has nothing to do", self._session.run, max_steps)
                self.state = transformers.TrainerState(**state["state"])
                return transformers.trainer_utils.TrainOutput(self.state.global_step, 0.0, {})
            self._steps = self._session.steps(max_steps)
            try:
                with TemporaryDirectory() as folder:
                    if state:  # the Trainer reads it as that of a checkpoint
                        with open(os.path.join(folder, "trainer_state.json"), "w") as file:
                            json.dump(state["state"], file)
                    output = super().train(folder if state else None, *args, **options)
                if self.state.global_step >= max_steps:
                    next(self._steps, None)  # ends the loop
                return output
            except _StepChangedError as moved:
                if str(moved) == former:
                    raise StepRestartedError(
                        f"{moved}, and the run has no state from which the Trainer could continue: start this trainer "
                        "again, such as by shardwell launch --restart 3"
                    ) from moved
                former = str(moved)
                logger.warning("%s: it continues at that of the run", moved)
            finally:
                self._steps.close()

    def _start_state(self) -> dict[str, Any] | None:
        """Returns the state of the last commit. None at the start of a run."""
        state = self._tracked.restored or (self._tracked.state_dict() if self.state.global_step else None)
        if state is None and self._session.step:
            refuse_unknown_steps(self._session)
        self._tracked.applied = state
        return state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights are on the shard servers."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Computes and commits a step of the run in the call for its last micro-batch.

        Returns:
            The mean loss of the data ranks.
        """
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        optimizer = self._sharded
        optimizer.repeats = True
        while optimizer.repeats:
            step: Any = next(self._steps, None)
            if step is None or step.number != self.state.global_step:
                raise _StepChangedError(
                    f"the run is at step {self._session.step}, and the Trainer is at step {self.state.global_step}"
                )
            self._tracked.restored = None
            self._compute(step, model)
            norm = float(optimizer.clip_grad_norm_(self.args.max_grad_norm)) if self.args.max_grad_norm > 0 else None
            optimizer.step()
            self._tracked.restored = None  # a repeated step has restored it
        self._set_duties(0 in step.global_ranks)
        self._norm = norm if norm is not None and math.isfinite(norm) else None
        # A step that is repeated long after its commit has no means. The Trainer leaves NaN out of its averages.
        return torch.tensor(step.means.get("loss", math.nan), device=self.args.device, dtype=torch.float32)

    def _compute(self, step: Step, model: Any) -> None:
        """Computes the work items of this trainer."""
        num_items = self._num_items(step.number)
        for batches in step.batches(self._batches):
            micro_batches, own = super().get_batch_samples(iter(batches), len(batches), self.args.device)
            loss = torch.zeros((), device=self.args.device)
            for index, batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                with nullcontext() if is_last else getattr(self.model, "no_sync", nullcontext)():
                    loss += super().training_step(model, batch, own if num_items is None else num_items)
                if not self._session.in_flight.state.require_current().is_over:  # otherwise another batch counts
                    self.current_flos += float(self.floating_point_ops(batch))
                    self._track_num_input_tokens(batch)
            step.log(loss=loss)

    def _num_items(self, step: int) -> torch.Tensor | None:
        """Returns the tokens of a step per data rank if the loss averages over the tokens of all of them."""
        dp, total = self._session.world.dp, 0
        if dp == 1 or not self.args.average_tokens_across_devices:
            return None
        for dp_rank in range(dp):
            batches = self._batches(step, dp_rank)
            _, own = super().get_batch_samples(iter(batches), len(batches), self.args.device)
            if own is None:
                return None
            total += int(own)
        return torch.tensor(total / dp, device=self.args.device)

    def _set_duties(self, plays_rank_0: bool) -> None:
        """Sets whether this trainer prints, logs and saves. It also does while it replaces the trainer of rank 0."""
        self._plays_rank_0, before = plays_rank_0, self.state.is_world_process_zero
        self.state.is_world_process_zero = self.state.is_local_process_zero = plays_rank_0
        if plays_rank_0 and not before:  # callbacks open their bars and files
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns a loader with the length of a data rank's. ``training_step`` makes the batches."""
        if isinstance(self.train_dataset, IterableDataset):
            raise UsageError(
                f"train_dataset is a {type(self.train_dataset).__name__}: any trainer may have to compute any batch, "
                "so pass a dataset with __len__ and __getitem__"
            )
        loader = super().get_train_dataloader()
        whole, dp = loader.batch_sampler, self._session.world.dp
        shards = [BatchSamplerShard(whole, dp, rank) for rank in range(dp)] if dp > 1 else [whole]
        accumulation, seeds = self.args.gradient_accumulation_steps, (self._session.seed, self.args.seed)
        self._batches = WorkItemBatches(loader, shards, accumulation, seed=seeds[0], sampler_seed=seeds[1])
        return DataLoader(loader.dataset, batch_sampler=shards[0], collate_fn=loader.collate_fn)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Returns empty batches. See ``get_train_dataloader``."""
        return [{} for _ in range(num_batches)], None

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As in Transformers. 0 for the empty batches of ``get_batch_samples``."""
        return int(super().floating_point_ops(inputs)) if inputs else 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if inputs:
            super()._track_num_input_tokens(inputs)

    # ---- optimizer ----

    def create_optimizer(self, model: Any = None) -> Any:
        """Makes the optimizer of ``shardwell.optim`` for ``args.optim``, unless ``optimizers`` has one."""
        if self._sharded is not None:
            return self.optimizer
        if self.optimizer is None:
            given = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            kind, options = given[0], {k: v for k, v in given[1].items() if k not in ("fused", "foreach")}
            if kind.__module__.startswith("torch.optim"):
                kind = getattr(optim, kind.__name__, kind)
            self.optimizer_cls_and_kwargs = kind, options
            if isinstance(kind, type) and issubclass(kind, optim.ShardedOptimizer):
                super().create_optimizer(model)
        if not isinstance(self.optimizer, optim.ShardedOptimizer):
            raise UsageError(
                f"the Trainer's optimizer is {self.args.optim if self.optimizer is None else type(self.optimizer)}, "
                "which would run on this trainer only: pass optimizers=(shardwell.optim.AdamW(model.parameters(), "
                "lr=...), None), or shardwell.ClientSide for an optimizer of your own"
            )
        self._sharded = self.optimizer
        self.optimizer = _CommittedOptimizer(self._sharded, device_placement=False)
        self._session.track(trainer=self._tracked)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Makes the learning rate schedule, and restores its state."""
        schedule = super().create_scheduler(num_training_steps, optimizer)
        if self._tracked.applied is not None:
            schedule.load_state_dict(decode_state(self._tracked.applied["schedule"]))
            for group, lr in zip(self.optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = lr
        return schedule

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return self._norm

    # ---- processes and folders ----

    def create_accelerator_and_postprocess(self) -> None:
        """Makes an accelerator for one process, whose order of the data depends on the seed only."""
        with single_process():
            super().create_accelerator_and_postprocess()
        config = self.accelerator.dataloader_config
        config.data_seed = self.args.seed if config.data_seed is None else config.data_seed

    def is_world_process_zero(self) -> bool:
        """True if this trainer plays rank 0."""
        return self._plays_rank_0

    is_local_process_zero = is_world_process_zero

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the weights of the newest step in the trainer of rank 0."""
        if self._plays_rank_0:
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, full_state_dict(self.model) if state_dict is None else state_dict)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self._plays_rank_0:
            return
        super()._save_checkpoint(model, trial)
        try:
            self._session.save_checkpoint()
        except StepStateError:
            transformers.utils.logging.get_logger(__name__).warning_once(
                "the folders of save_steps have weights, but not the optimizer's state, which is on the shard servers. "
                "To be able to resume from them, call shardwell.join(checkpoint_dir=...)"
            )


class _StepChangedError(Exception):
    """The run is at another step than the Trainer."""


class _CommittedOptimizer(AcceleratedOptimizer):
    """The Trainer's view of an optimizer that ``training_step`` steps. Accelerate does not wrap it again."""

    _is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """Does nothing: the step is committed."""


class _TrackedTrainer:
    """The state of a Trainer that the run stores with every commit.

    Attributes:
        restored: State from a commit that the Trainer has to start from. None: it is there.
        applied: State with which ``train`` has started.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.restored: dict[str, Any] | None = None
        self.applied: dict[str, Any] | None = None

    @property
    def optimizer(self) -> Any:
        """The optimizer, whose hyper-parameters are stored, too."""
        return self._trainer._sharded

    def state_dict(self) -> dict[str, Any]:
        """Returns the state before the learning rate is updated for the next step."""
        if self.restored is not None:
            return self.restored
        trainer, schedule = self._trainer, self._trainer.lr_scheduler
        callbacks: list[Any] = [
            each
            for each in [*trainer.callback_handler.callbacks, trainer.control]
            if isinstance(each, transformers.trainer_callback.ExportableState)
        ]
        state = dataclasses.replace(trainer.state, log_history=[], stateful_callbacks=callbacks)
        return {"state": dataclasses.asdict(state), "schedule": encode_state(schedule.state_dict()) if schedule else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes a state for the next start of the Trainer's loop."""
        self.restored = state


def _session_of(model: Any) -> Session:
    for parameter in model.parameters() if isinstance(model, torch.nn.Module) else ():
        if (session := session_of(parameter)) is not None:
            check_session(session)
            return session
    raise UsageError(
        "the Trainer's model is not sharded: call shardwell.auto_wrap(model, session) before, with session = "
        "shardwell.join(). A model_init cannot be used, because each model needs a run of its own"
    )
