"""``shardwell.integrations.lightning`` against Lightning without Shardwell: the same bits."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shardwell
import shardwell.testing
from shardwell.integrations import single_process
from shardwell.integrations.item_batches import WorkItemBatches
from shardwell.integrations.lightning import ShardwellStrategy, _Shard
from shardwell_wire.errors import UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:a sharded module runs under torch.autocast"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]


class StoppedError(Exception):
    """Ends a training in the midst."""


class Points(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), torch.tensor([float(index % 3)])


class CountedPoints(Points):
    """Counts the samples that this process reads."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads += 1
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


class Regression(pl.LightningModule):
    """A small model. Its learning rate falls with every step."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.model(inputs), targets))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Recorder(pl.Callback):
    """Records losses by step. Stops after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.losses: dict[str, float] = {}
        self.stop_after = stop_after

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        if outputs and (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses[f"step {trainer.global_step}"] = float(outputs["loss"])
        if trainer.global_step == self.stop_after:
            raise StoppedError

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.losses[f"validation {trainer.global_step}"] = float(trainer.callback_metrics["val_loss"])


def fused_adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """The variant of AdamW that the shard servers compute."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def trainer(strategy: Any, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    given = {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 1,
        **options,
    }
    with single_process():
        return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **given)


def fit(at: pl.Trainer, module: pl.LightningModule, size: int) -> None:
    at.fit(module, DataLoader(Points(size), batch_size=2), DataLoader(Points(6), batch_size=2))


def sharded_module(session: shardwell.Session) -> Regression:
    module = Regression(shardwell.optim.AdamW)
    shardwell.auto_wrap(module.model, session)
    return module


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "accumulation": (1, {}, {}),
    "bf16": (1, {}, {"precision": "bf16-mixed", "accumulate_grad_batches": 1}),
    "clipped values": (1, {}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "two ranks": (2, {"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 1, "val_check_interval": 2}),
}
"""Data ranks, options of the plain Trainer only, and options."""


@pytest.mark.parametrize("case", CASES)
def test_strategy_computes_the_bits_of_plain_lightning(case: str) -> None:
    dp, plain_options, options = CASES[case]
    expected_losses, losses = Recorder(), Recorder()
    expected, plain = (
        Regression(fused_adamw),
        trainer("auto", expected_losses, **{**options, "val_check_interval": 4, **plain_options}),
    )
    fit(plain, expected, 24)
    with shardwell.testing.in_process_cluster(dp=dp), shardwell.join() as session:
        module, at = sharded_module(session), trainer(ShardwellStrategy(session), losses, **options)
        fit(at, module, 24)
        values = shardwell.full_state_dict(module)
        predicted = at.predict(module, DataLoader(Points(4), batch_size=2))
        assert (at.global_step, at.current_epoch) == (plain.global_step, 2)
        assert session.step == plain.global_step
    assert all(torch.equal(value, values[name]) for name, value in expected.state_dict().items())
    assert [*losses.losses] == [*expected_losses.losses]
    if dp == 1:
        assert losses.losses == expected_losses.losses
    for found, value in zip(predicted, plain.predict(expected, DataLoader(Points(4), batch_size=2)), strict=True):
        assert torch.equal(found, value)


def test_clipping_by_norm_equals_that_of_lightning_to_the_rounding_of_the_norm() -> None:
    expected = Regression(fused_adamw)
    fit(trainer("auto", gradient_clip_val=0.1), expected, 24)
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        module = sharded_module(session)
        fit(trainer(ShardwellStrategy(session), gradient_clip_val=0.1), module, 24)
        values = shardwell.full_state_dict(module)
    torch.testing.assert_close(dict(values), dict(expected.state_dict()), rtol=1e-4, atol=1e-6)


def test_run_goes_on_in_another_trainer(tmp_path: Path) -> None:
    """Losses, validations, early stopping and the best checkpoint are those of a Trainer that was never stopped."""

    def callbacks(folder: str) -> list[pl.Callback]:
        return [
            EarlyStopping("val_loss", patience=2, min_delta=0.05),
            ModelCheckpoint(tmp_path / folder, "best", monitor="val_loss", save_top_k=1),
        ]

    losses, expected = Recorder(), Regression(fused_adamw)
    plain = trainer("auto", losses, *callbacks("a"), max_epochs=9)
    fit(plain, expected, 24)
    assert 8 < plain.global_step < 54, "the training must stop early"
    with shardwell.testing.in_process_cluster():
        for stop_after in (3, 6, None):
            with shardwell.join() as session:
                module, found = sharded_module(session), Recorder(stop_after)
                at = trainer(ShardwellStrategy(session), found, *callbacks("b"), max_epochs=9)
                if stop_after is None:
                    fit(at, module, 24)
                    values = shardwell.full_state_dict(module)
                else:
                    with pytest.raises(StoppedError):
                        fit(at, module, 24)
            assert found.losses and found.losses.items() <= losses.losses.items()
    assert at.global_step == plain.global_step
    assert all(torch.equal(value, values[name]) for name, value in expected.state_dict().items())
    saved, best = (torch.load(tmp_path / folder / "best.ckpt") for folder in "ba")
    assert saved["global_step"] == best["global_step"]
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in best["state_dict"].items())


def test_iteration_that_is_repeated_logs_its_losses_once() -> None:
    class VoidsAnIteration(Regression):
        count = 0

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.count += 1
            return super().training_step(batch, index)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.count == 8:
                self.count += 100  # once
                session.in_flight.iteration.void(3, "a test")

    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        module = VoidsAnIteration(shardwell.optim.AdamW)
        shardwell.auto_wrap(module.model, session)
        fit(trainer(ShardwellStrategy(session)), module, 24)
        assert (module.count, session.step) == (100 + 24, 12)


class StepwiseRegression(Regression):
    """Its learning rate falls at step 3."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters(), lr=0.08)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rate(at: pl.Trainer) -> float:
    return float(at.optimizers[0].param_groups[0]["lr"])


def test_milestones_and_a_second_fit_continue_in_another_trainer() -> None:
    """The rate falls after the restart, and a second fit() goes on where the first one has ended."""
    with shardwell.testing.in_process_cluster():
        for stop_after in (2, None):
            with shardwell.join() as session:
                module = StepwiseRegression(shardwell.optim.AdamW)
                shardwell.auto_wrap(module.model, session)
                at = trainer(ShardwellStrategy(session), Recorder(stop_after), max_epochs=1)
                if stop_after is not None:
                    with pytest.raises(StoppedError):
                        fit(at, module, 24)
                    assert rate(at) == 0.08
                    continue
                fit(at, module, 24)
                assert (at.global_step, rate(at)) == (6, 0.04)
                second = trainer(ShardwellStrategy(session), max_epochs=2)
                fit(second, module, 24)
                assert (second.global_step, session.step, rate(second)) == (12, 12, 0.04)
        with shardwell.join(run="another") as session:  # the run is new when its first fit() begins
            module = StepwiseRegression(shardwell.optim.AdamW)
            shardwell.auto_wrap(module.model, session)
            for epochs in (1, 2):
                at = trainer(ShardwellStrategy(session), max_epochs=epochs)
                fit(at, module, 24)
                assert (at.global_step, session.step, rate(at)) == (6 * epochs, 6 * epochs, 0.04)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        module = sharded_module(session)
        loader = DataLoader(Points(8), batch_size=2)
        with pytest.raises(UsageError, match="pass a DataLoader whose dataset has __len__"):
            trainer(ShardwellStrategy(session), limit_val_batches=0, val_check_interval=None).fit(
                module, DataLoader(Stream(), batch_size=2)
            )
        with pytest.raises(UsageError, match="pass a DataLoader with a batch_size or a batch_sampler"):
            trainer(ShardwellStrategy(session)).fit(module, DataLoader(Points(8), batch_size=None), loader)
        with pytest.raises(UsageError, match="pass more samples, a smaller batch_size, drop_last=False"):
            few = DataLoader(Points(2), batch_size=4, drop_last=True)
            trainer(ShardwellStrategy(session)).fit(module, few, loader)
        with pytest.raises(UsageError, match=r"a DataLoader of a torch\.utils\.data\.Subset"):
            trainer(ShardwellStrategy(session), limit_train_batches=3).fit(module, loader, loader)
        with pytest.raises(UsageError, match="several training loaders"):
            trainer(ShardwellStrategy(session)).fit(module, [loader, loader], loader)
        path = tmp_path / "x.ckpt"
        torch.save({"pytorch-lightning_version": pl.__version__, "state_dict": {}}, path)
        module.strict_loading = False
        with pytest.raises(UsageError, match=r"Call fit\(\) without it"):
            trainer(ShardwellStrategy(session)).fit(module, loader, ckpt_path=path)
        module.automatic_optimization = False
        with pytest.raises(UsageError, match=r"write a training loop over session\.steps"):
            trainer(ShardwellStrategy(session), accumulate_grad_batches=1).fit(module, loader)
        with pytest.raises(UsageError, match=r"expected one of shardwell\.optim"):
            trainer(ShardwellStrategy(session)).fit(Regression(torch.optim.SGD), loader)


def test_batches_are_made_by_the_workers_of_the_loader() -> None:
    weights = []
    with shardwell.testing.in_process_cluster():
        for workers in (0, 2):
            with shardwell.join(run=f"workers-{workers}") as session:
                module, data = sharded_module(session), CountedPoints(12)
                loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
                trainer(ShardwellStrategy(session), limit_val_batches=0, val_check_interval=None).fit(module, loader)
                weights.append(shardwell.full_state_dict(module))
                assert data.reads < 24 if workers else data.reads == 24
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class Shuffled:
    """A sampler that draws from a generator which torch does not seed."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Any:
        order = list(range(12))
        self.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 12


def item_batches(shuffle: Callable[[list[int]], None]) -> WorkItemBatches:
    loader = DataLoader(range(12), batch_size=2, sampler=Shuffled(shuffle))  # type: ignore[arg-type]
    shards = [_Shard(loader.batch_sampler, 2, rank) for rank in range(2)]
    return WorkItemBatches(loader, shards, 3, seed=0, sampler_seed=0)


@pytest.mark.parametrize("shuffle", [random.shuffle, numpy.random.shuffle])
def test_samplers_may_draw_from_python_and_numpy(shuffle: Callable[[list[int]], None]) -> None:
    batches = item_batches(shuffle)
    epochs = [[batches(step, rank) for rank in range(2)] for step in range(2)]
    for ranks in epochs:
        assert sorted(torch.cat([batch for each in ranks for batch in each]).tolist()) == list(range(12))
    assert str(epochs[0]) != str(epochs[1])


def test_order_that_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(UsageError, match=r"BatchSampler or Shuffled lists another order .* set_epoch\(epoch\)"):
        item_batches(random.Random(0).shuffle)(0, 0)


class SkippingRegression(Regression):
    def training_step(self, batch: Any, index: int) -> Any:
        return None


def test_training_step_without_a_loss_is_refused() -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        module = SkippingRegression(shardwell.optim.AdamW)
        shardwell.auto_wrap(module.model, session)
        with pytest.raises(UsageError, match=r"SkippingRegression\.training_step returned no loss"):
            fit(trainer(ShardwellStrategy(session)), module, 8)


def test_teardown_ends_the_loop_and_restores_the_rank_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        rank, closed = rank_zero_only.rank, []
        module, strategy = sharded_module(session), ShardwellStrategy(session)
        at, teardown = trainer(strategy, max_epochs=1), strategy.teardown

        def fail() -> Any:
            try:
                raise StoppedError
                yield
            finally:
                closed.append(strategy._steps)

        def tear_down() -> None:
            strategy._steps = None if closed else fail()
            strategy._set_duties(False)
            teardown()

        monkeypatch.setattr(strategy, "teardown", tear_down)
        with pytest.raises(StoppedError):
            fit(at, module, 8)
        assert closed == [None]
        assert rank_zero_only.rank == rank


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name == "lightning" or name.startswith("lightning."):
            monkeypatch.setitem(sys.modules, name, None)  # an import raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "shardwell.integrations.lightning")
    with pytest.raises(ImportError, match=r"cannot import lightning.*pip install"):
        importlib.import_module("shardwell.integrations.lightning")
