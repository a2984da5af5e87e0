"""Runs that continue from a checkpoint with other data ranks or other units, compared with plain training."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.integration.test_checkpoints import events_of
from tests.support import transformer
from tests.support.cluster import cluster_fixture
from tests.support.reference import ADAMW, train_plain

pytestmark = pytest.mark.usefixtures("one_thread")

SAVED, STEPS = 3, 5
Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, tuple[Callable[[Parameters], Any], Callable[[Parameters], torch.optim.Optimizer]]] = {
    "on servers": (
        lambda parameters: shardwell.optim.AdamW(parameters, **ADAMW),
        lambda parameters: torch.optim.AdamW(parameters, fused=True, **ADAMW),
    ),
    "on trainers": (
        lambda parameters: shardwell.ClientSide(parameters, torch.optim.AdamW, **ADAMW),
        lambda parameters: torch.optim.AdamW(parameters, **ADAMW),
    ),
}


cluster = cluster_fixture(num_shards=3)


def train(
    cluster: shardwell.LocalCluster,
    folder: Path,
    dp: int,
    steps: int,
    make_optimizer: Callable[[Parameters], Any],
    *,
    resume: str = "",
    policy: Any = None,
    **options: Any,
) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Trains in this process. Returns the run, its checkpoint at the end, and the final state."""
    run, waits = uuid.uuid4().hex, shardwell.WaitOptions(wait_limit_s=30)
    with shardwell.join(
        cluster.address,
        run=run,
        world=shardwell.World(dp=dp),
        min_trainers=1,
        checkpoint_dir=str(folder),
        resume=resume or None,
        waits=waits,
        **options,
    ) as session:
        assert session.step == (shardwell.open_checkpoint(resume).step if resume else 0)
        model = transformer.build()
        shardwell.auto_wrap(model, session, policy or shardwell.ModuleTypePolicy({transformer.Block}))
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        session.track(scheduler=scheduler)
        for step in session.steps(steps):
            for tokens in step.batches(transformer.batch):
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return run, session.save_checkpoint(wait=True), shardwell.full_state_dict(model)


def plain(make_optimizer: Callable[[Parameters], torch.optim.Optimizer], before: int, after: int) -> Any:
    """Trains with one number of data ranks, and then with another. Returns the final state."""
    model = transformer.build()
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for step in range(STEPS):
        train_plain(
            model, optimizer, transformer.batch, dp=before if step < SAVED else after, first=step, steps=step + 1
        )
        scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize("where", OPTIMIZERS)
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_another_number_of_data_ranks_trains_on_from_the_state_of_the_checkpoint(
    cluster: shardwell.LocalCluster, tmp_path: Path, where: str, before: int, after: int
) -> None:
    make, make_plain = OPTIMIZERS[where]
    _, url, _ = train(cluster, tmp_path, before, SAVED, make)
    run, resumed, state = train(cluster, tmp_path, after, STEPS, make, resume=url)
    expected = plain(make_plain, before, after)
    assert [name for name in expected if not torch.equal(expected[name], state[name])] == []
    manifest = shardwell.open_checkpoint(resumed).manifest
    assert (manifest.world.dp, manifest.step) == (after, STEPS)
    (message,) = events_of(cluster.address, run)["data_ranks_changed"]
    assert message.startswith(f"the checkpoint has dp={before}, and this run dp={after}: from step {SAVED} on")
    assert message.endswith("not taken over: nothing")


def test_residuals_of_other_data_ranks_are_not_taken_over(
    cluster: shardwell.LocalCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, options = OPTIMIZERS["on servers"][0], shardwell.TransferOptions(push_dtype="int8", push_error_feedback=True)
    _, url, _ = train(cluster, tmp_path, 2, SAVED, make, transfers=options)
    run, _, state = train(cluster, tmp_path, 3, SAVED + 1, make, resume=url, transfers=options)
    (message,) = events_of(cluster.address, run)["data_ranks_changed"]
    assert message.endswith("not taken over: the residuals of error feedback of data ranks [0, 1], which start at zero")
    assert f"checkpoint {url} has other data ranks" in caplog.text
    # The first step pushes what a run without error feedback pushes.
    without = shardwell.TransferOptions(push_dtype="int8")
    _, _, expected = train(cluster, tmp_path, 3, SAVED + 1, make, resume=url, transfers=without)
    assert [name for name in expected if not torch.equal(expected[name], state[name])] == []


@pytest.mark.parametrize("where", OPTIMIZERS)
@pytest.mark.parametrize(
    "policy",
    [shardwell.SizePolicy(10**9), shardwell.ModuleTypePolicy({transformer.Block, nn.LayerNorm})],
    ids=["one unit", "smaller units"],
)
def test_model_that_is_wrapped_differently_trains_on_with_the_same_bits(
    cluster: shardwell.LocalCluster, tmp_path: Path, where: str, policy: Any
) -> None:
    make, make_plain = OPTIMIZERS[where]
    _, url, _ = train(cluster, tmp_path, 2, SAVED, make)
    _, resumed, state = train(cluster, tmp_path, 2, STEPS, make, resume=url, rewrap=True, policy=policy)
    expected = plain(make_plain, 2, 2)
    assert [name for name in expected if not torch.equal(expected[name], state[name])] == []
    units = [[unit.unit for unit in shardwell.open_checkpoint(at).manifest.units] for at in (url, resumed)]
    assert units[0] != units[1]
    # A run resumes from its own checkpoint without the option.
    _, _, again = train(cluster, tmp_path, 2, STEPS + 1, make, resume=resumed, policy=policy)
    assert again.keys() == state.keys()
    with pytest.raises(shardwell.ShardwellError, match=r"continue in a new run with join\(..., rewrap=True\)"):
        train(cluster, tmp_path, 2, STEPS, make, resume=url, policy=policy)
