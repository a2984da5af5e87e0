"""Ranks that have parts of the same sequences train as one process does, and bits do not depend on deaths."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main
from shardwell.parallel import ContextParallel
from shardwell.planning import Plan, PlanOptions, plan_run
from shardwell_wire.errors import ReplicaLostError, UsageError
from tests.support import gloo, long_gpt
from tests.support.grid_runs import assert_equal, contents
from tests.support.processes import fork_context, run_ranks
from tests.support.split_gpt import loss_of

MOMENTUM = 0.9


def trained(
    rank: int, address: str, run: str, world: shardwell.World, options: dict[str, Any], planned_bytes: int | None
) -> None:
    """Trains, and compares the losses, and the bytes that this trainer sends if the number is given."""
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        losses = long_gpt.train(session, **options)
        assert losses == pytest.approx(long_gpt.reference(world.dp)[1], rel=1e-5), "the mean over all tokens"
        if planned_bytes is not None:
            assert 0.98 * planned_bytes < session.stats()["pushed_bytes"] <= planned_bytes, "without alignment"
    gloo.leave()


def planned(world: shardwell.World) -> Plan:
    """Returns the plan of the training. Its example call has a part of each sequence."""
    part = torch.zeros(long_gpt.BATCH, long_gpt.LENGTH // world.cp, dtype=torch.int64)
    return plan_run(lambda: (long_gpt.gpt(), (part, part[:1])), PlanOptions(world=world, optimizer="sgd"))


def read(address: str, run: str) -> dict[str, torch.Tensor]:
    with shardwell.attach(address, run=run) as reader, reader.pin() as pinned:
        return dict(pinned.values())


def train(
    address: str, world: shardwell.World, *, compares_bytes: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    run, steps = uuid.uuid4().hex, long_gpt.STEPS
    planned_bytes = steps * planned(world).trainer.sent_bytes if compares_bytes else None
    run_ranks(trained, address, run, world, options, planned_bytes, count=world.size)
    return read(address, run)


def require_close(found: dict[str, torch.Tensor], dp: int, **options: Any) -> None:
    expected, initial = long_gpt.reference(dp, **options)[0], dict(long_gpt.gpt().named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).abs().max() <= 1e-6, name
        assert (expected[name] - initial[name]).abs().max() > 1e-4, name


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (shardwell.World(cp=2), {}),
        (shardwell.World(cp=2), {"checkpointed": True}),
        (shardwell.World(cp=2), {"load_balance": False, "on_trainers": True}),
        (shardwell.World(dp=2, cp=2), {}),
        pytest.param(shardwell.World(cp=4), {}, marks=pytest.mark.long),
        (shardwell.World(cp=4), {"load_balance": False}),
        (shardwell.World(dp=2), {}),
    ],
    ids=str,
)
def test_parts_of_sequences_train_as_whole_ones(
    cluster: shardwell.LocalCluster, world: shardwell.World, options: dict[str, Any]
) -> None:
    require_close(train(cluster.address, world, compares_bytes=not options, **options), world.dp)


def trained_experts(rank: int, address: str, run: str, folder: Path) -> None:
    used: list[list[list[int]]] = []
    with shardwell.join(address, run=run, world=shardwell.World(cp=2), global_rank=rank, host="here") as session:
        long_gpt.train(session, experts=True, note_experts=lambda sets: used.append([sorted(each) for each in sets]))
    (folder / str(rank)).write_text(json.dumps(used))
    gloo.leave()


def test_experts_get_the_tokens_of_all_parts(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    """An expert without tokens on one rank is neither gathered nor pushed there."""
    run = uuid.uuid4().hex
    run_ranks(trained_experts, cluster.address, run, tmp_path)
    first, second = (
        [{(at, number) for at, numbers in enumerate(blocks) for number in numbers} for blocks in json.loads(text)]
        for text in ((tmp_path / str(rank)).read_text() for rank in range(2))
    )
    assert all(one - other and other - one for one, other in zip(first, second, strict=True)), "routes differ"
    found, initial = read(cluster.address, run), dict(long_gpt.gpt(experts=True).named_parameters())
    expected = long_gpt.reference(experts=True)[0]
    for name, value in found.items():
        assert (value - expected[name]).abs().max() <= 1e-6, name
    moved = {name for name, value in found.items() if ".experts." in name and not torch.equal(value, initial[name])}
    assert {name for name in moved if name.endswith("weight")} == {
        f"blocks.{at}.mlp.experts.{number}.weight" for at, number in set.union(*first, *second)
    }


def divided(rank: int, address: str, run: str, world: shardwell.World, options: dict[str, Any]) -> None:
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        long_gpt.train_divided(session, **options)
    gloo.leave()


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(shardwell.World(cp=2, tp=2), {"fused_by_head": True}, marks=pytest.mark.long),
        (shardwell.World(cp=2, tp=2), {"fused_by_head": True, "sequence_parallel": True}),
        pytest.param(shardwell.World(cp=2, pp=2), {}, marks=pytest.mark.long),
        (shardwell.World(cp=2, pp=2), {"tied": True}),
    ],
    ids=str,
)
def test_all_axes_train_together(
    cluster: shardwell.LocalCluster,
    world: shardwell.World,
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, tied = uuid.uuid4().hex, options.get("tied", False)
    run_ranks(divided, cluster.address, run, world, options, count=world.size)
    require_close(read(cluster.address, run), world.dp, tied=tied)
    capsys.readouterr()
    assert main(["units", run, "--json", "--address", cluster.address]) == 0
    stages = [unit.get("pp_ranks") for unit in json.loads(capsys.readouterr().out)["units"]]
    assert stages.count([0, 1]) == tied, "stored once"


# ---- checkpoints ----


def saved(
    rank: int, address: str, run: str, world: shardwell.World, steps: int, options: dict[str, Any], **more: Any
) -> None:
    """Trains a run until it has so many steps, and saves a checkpoint."""
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here", **more) as session:
        before = session.step
        losses = long_gpt.train(session, steps=steps, momentum=MOMENTUM, **options)
        expected = long_gpt.reference(momentum=MOMENTUM)[1][before:steps]
        assert losses == pytest.approx(expected, rel=1e-5), "the mean over all tokens"
        if rank == 0:
            session.save_checkpoint(wait=True)
    gloo.leave()


@pytest.mark.parametrize(
    "on_trainers",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["optimizer on servers", "optimizer on trainers"],
)
def test_run_continues_with_another_number_of_context_ranks(
    cluster: shardwell.LocalCluster, tmp_path: Path, on_trainers: bool
) -> None:
    def run(world: shardwell.World, steps: int, resume: str | None = None) -> str:
        """Returns the URL of the checkpoint at the end."""
        name = uuid.uuid4().hex
        work = partial(saved, checkpoint_dir=str(tmp_path), resume=resume)
        run_ranks(work, cluster.address, name, world, steps, {"on_trainers": on_trainers}, count=world.size)
        if steps == long_gpt.STEPS:
            require_close(read(cluster.address, name), world.dp, momentum=MOMENTUM)
        return shardwell.open_checkpoint(tmp_path, run=name).url

    steps = long_gpt.STEPS // 2
    first = run(shardwell.World(cp=2), steps)
    assert shardwell.open_checkpoint(first).manifest.world == shardwell.World(cp=2)
    whole = run(shardwell.World(), steps, resume=first)
    four = run(shardwell.World(cp=4), steps, resume=whole)
    for url in (whole, four):
        assert_equal(contents(url), contents(first))
    for world in (shardwell.World(), shardwell.World(cp=4)):
        run(world, long_gpt.STEPS, resume=first)


# ---- deaths ----


def train_until(rank: int, address: str, run: str, killed_at: int | None) -> None:
    """Trains in a replica that is formed again when a trainer is lost. Kills itself before it ends that step's item."""
    world = shardwell.World(cp=2)
    with shardwell.join(address, run=run, world=world, global_rank=rank, trainer=f"t{rank}", host="here") as session:
        if killed_at is not None:
            pushed: Callable[..., Any] = session.in_flight.items.end_item

            def end_item() -> None:
                pushed()
                if session.step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            session.in_flight.items.end_item = end_item  # type: ignore[method-assign]
        session.run_replica(long_gpt.train)
    gloo.leave()


def test_bits_do_not_depend_on_the_death_of_a_rank(cluster: shardwell.LocalCluster) -> None:
    undisturbed = train(cluster.address, shardwell.World(cp=2))
    run = uuid.uuid4().hex
    lost, survivor = (
        fork_context.Process(target=train_until, args=(rank, cluster.address, run, at), daemon=True)
        for rank, at in ((1, 2), (0, None))
    )
    for process in (survivor, lost):
        process.start()
    lost.join(60)
    assert lost.exitcode == -signal.SIGKILL
    substitute = fork_context.Process(target=train_until, args=(1, cluster.address, run, None), daemon=True)
    substitute.start()
    for process in (survivor, substitute):
        process.join(60)
        assert process.exitcode == 0
    found = read(cluster.address, run)
    for name, value in undisturbed.items():
        assert torch.equal(value, found[name]), name


def evaluate(rank: int, address: str, run: str) -> None:
    """Evaluates before the first step. Rank 1 kills itself meanwhile."""
    with shardwell.join(address, run=run, world=shardwell.World(cp=2), global_rank=rank, host="here") as session:
        context, model = ContextParallel(session), long_gpt.gpt()
        shardwell.auto_wrap(model, session)
        shardwell.optim.SGD(model.parameters(), lr=0.1)
        tokens = context.split(long_gpt.batch(0, 0)[0])
        with torch.no_grad(), context:
            model(tokens, context.positions(tokens))
        with pytest.raises(ReplicaLostError, match="was lost or replaced"), torch.no_grad(), context:
            if rank:
                os.kill(os.getpid(), signal.SIGKILL)
            model(tokens, context.positions(tokens))
    gloo.leave()


def test_lost_rank_ends_an_evaluation_of_the_other(cluster: shardwell.LocalCluster) -> None:
    run = uuid.uuid4().hex
    ranks = [fork_context.Process(target=evaluate, args=(rank, cluster.address, run), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process, expected in zip(ranks, (0, -signal.SIGKILL), strict=True):
        process.join(60)
        assert process.exitcode == expected


# ---- mistakes ----


def mistaken(rank: int, address: str, run: str) -> None:
    """Makes each mistake on both ranks."""
    with shardwell.join(address, run=run, world=shardwell.World(cp=2), global_rank=rank, host="here") as session:
        context, model = ContextParallel(session), long_gpt.gpt()
        shardwell.auto_wrap(model, session)
        tokens, targets = long_gpt.batch(0, 0)
        with pytest.raises(UsageError, match=r"length 14 .* cp=2 needs a multiple of 4"):
            context.split(tokens[:, :14], targets[:, :14])
        with pytest.raises(UsageError, match="split different sequences"):
            context.split(tokens + rank)
        assert context.positions(context.split(tokens)).tolist() == [
            [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]][rank]
        ]
        query = torch.zeros(1, 2, 4, 8)
        attend = torch.nn.functional.scaled_dot_product_attention
        with context:
            called = session.in_flight.items.attention_calls
            nn.MultiheadAttention(8, 2, batch_first=True)(*[query[0]] * 3, need_weights=False)
            assert session.in_flight.items.attention_calls == called + 1
        assert torch.nn.functional.scaled_dot_product_attention is attend
        session.in_flight.items.attention_calls = 0
        with context:
            for message, arguments in (
                ("attn_mask of shape", {"attn_mask": torch.ones(4, 4, dtype=torch.bool)}),
                ("dropout_p=0.5", {"dropout_p": 0.5}),
            ):
                with pytest.raises(UsageError, match=message):
                    attend(query, query, query, **arguments)
            with pytest.raises(UsageError, match="of equal length"):
                attend(query, query[:, :, :2], query[:, :, :2])
            drawn = torch.rand(())
        both = [torch.zeros(()), torch.zeros(())]
        torch.distributed.all_gather(both, drawn)
        assert both[0] != both[1], "dropout differs between parts"
        torch.distributed.all_gather(both, torch.rand(()))
        assert both[0] == both[1], "what the script draws does not"
        with pytest.raises(UsageError, match="called no attention over whole sequences"):
            for step in session.steps(1):
                for whole, wanted in step.batches(long_gpt.batch):
                    part, own = context.split(whole, wanted)
                    loss_of(model(part, context.positions(part)), own).backward()
    gloo.leave()


def test_mistakes_are_refused(cluster: shardwell.LocalCluster) -> None:
    run_ranks(mistaken, cluster.address, uuid.uuid4().hex, count=2)


def test_world_shows_the_context_axis(cluster: shardwell.LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["world", "--cp", "2", "--tp", "2", "--address", cluster.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "World(dp=1, cp=2, tp=2, pp=1): 4 ranks" in lines[0]
    heading, *rows = [line.split() for line in lines if line.strip()][1:]
    assert heading[:5] == ["RANK", "DP", "CP", "TP", "PP"]
    assert [row[:5] for row in rows if row[0].isdecimal()] == [
        ["0", "0", "0", "0", "0"],
        ["1", "0", "0", "1", "0"],
        ["2", "0", "1", "0", "0"],
        ["3", "0", "1", "1", "0"],
    ]
    assert main(["world", "--cp", "2", "--json", "--address", cluster.address]) == 0
    assert json.loads(capsys.readouterr().out)["world"]["cp"] == 2
