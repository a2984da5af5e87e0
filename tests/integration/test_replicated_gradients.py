"""Tensor-parallel ranks compute the same gradients of what all of them hold; a difference is an error and an event."""

from __future__ import annotations

import uuid

import pytest
import torch
from torch.nn import functional

import shardwell
from examples.gpt import GPT, GPTConfig
from shardwell.parallel import plan_tensor_parallel
from tests.support import gloo
from tests.support.cluster import events
from tests.support.processes import run_ranks
from tests.support.small_transformer import Transformer

STEPS, LENGTH, VOCABULARY, WRONG_STEP = 3, 6, 30, 1


def worker(
    rank: int, address: str, run: str, tp: int, sequence_parallel: bool, wrong_rank: int | None, is_allowed: bool
) -> None:
    world, waits = shardwell.World(tp=tp), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(
        address,
        run=run,
        world=world,
        global_rank=rank,
        host="here",
        waits=waits,
        allow_gradient_differences=is_allowed,
    ) as session:
        mesh = session.replica_mesh()
        torch.manual_seed(0)
        sizes = GPTConfig(
            vocab_size=VOCABULARY, context=LENGTH, num_layers=2, num_heads=6, width=24, tied=not sequence_parallel
        )
        plan = plan_tensor_parallel(GPT(sizes), tp, fused_by_head=True, sequence_parallel=sequence_parallel)
        torch.manual_seed(0)
        model = shardwell.auto_wrap(plan.apply(GPT(sizes), mesh["tp"]), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        step_number = -1

        def change(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 if rank == wrong_rank and step_number >= WRONG_STEP else gradient

        model.blocks[1].mlp_norm.weight.register_hook(change)

        def train() -> None:
            nonlocal step_number
            for step in session.steps(STEPS):
                step_number = step.number
                for tokens, targets in step.batches(batch):
                    loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()

        if wrong_rank is None or is_allowed:
            train()
        else:
            with pytest.raises(
                shardwell.ConflictError, match=r"of unit 'blocks.1' .*: 'blocks.1.mlp_norm.weight': rank"
            ):
                train()
            assert session.step == WRONG_STEP, "the step is not committed"
    gloo.leave()


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(
    address: str,
    tp: int,
    *,
    sequence_parallel: bool = False,
    wrong_rank: int | None = None,
    is_allowed: bool = False,
    run: str = "",
) -> str:
    run = run or uuid.uuid4().hex
    run_ranks(worker, address, run, tp, sequence_parallel, wrong_rank, is_allowed, count=tp)
    return run


def differences(address: str, run: str) -> list[str]:
    return [event.message for event in events(address, run) if event.kind == "gradients_differ"]


def test_a_wrong_gradient_of_one_rank_is_an_error_unless_it_is_allowed(cluster: shardwell.LocalCluster) -> None:
    right, wrong = train(cluster.address, 2), train(cluster.address, 2, wrong_rank=1)
    assert differences(cluster.address, right) == []
    (message,) = differences(cluster.address, wrong)
    assert message.startswith(f"step {WRONG_STEP}: tensor-parallel ranks of dp rank 0, pipeline rank 0, computed")
    assert "of unit 'blocks.1' that all of them hold: 'blocks.1.mlp_norm.weight': rank 1 (trainer" in message
    assert "join(allow_gradient_differences=True)" in message
    train(cluster.address, 2, wrong_rank=1, run=wrong)  # the error comes again
    train(cluster.address, 2, wrong_rank=1, run=wrong, is_allowed=True)
    assert differences(cluster.address, wrong) == [message], "the event is added once"
    found = []
    for run in (right, wrong):
        with shardwell.attach(cluster.address, run=run) as reader, reader.pin() as pinned:
            assert pinned.version == STEPS
            found.append(dict(pinned.values()))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items()), "rank 0's gradient counts"


@pytest.mark.parametrize("tp", [2, 3])
def test_sequence_parallel_ranks_reduce_to_the_same_bits(cluster: shardwell.LocalCluster, tp: int) -> None:
    """Each rank has a part of a norm's gradient. Their all-reduce gives the same bits on every rank."""
    assert differences(cluster.address, train(cluster.address, tp, sequence_parallel=True)) == []


def other_batch_worker(rank: int, address: str, run: str, world: shardwell.World, place: str) -> None:
    """The last rank gets another batch."""
    waits = shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here", waits=waits) as session:
        mesh = session.replica_mesh()
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=2, num_heads=6, width=24))
        plan = plan_tensor_parallel(model, 2, fused_by_head=True, sequence_parallel=True)
        shardwell.auto_wrap(plan.apply(model, mesh["tp"]), session)
        step = next(session.steps(1))
        with pytest.raises(shardwell.UsageError, match=f"ranks of {place} have different batches for dp rank 0"):
            next(step.batches(lambda number, dp_rank: batch(number + (rank == world.size - 1), dp_rank)))
    gloo.leave()


@pytest.mark.parametrize(
    ("world", "place"),
    [
        (shardwell.World(tp=2), "pipeline rank 0"),
        (shardwell.World(cp=2, tp=2), "context-parallel rank 1, pipeline rank 0"),
    ],
    ids=str,
)
def test_tensor_parallel_ranks_with_different_batches_are_refused(
    cluster: shardwell.LocalCluster, world: shardwell.World, place: str
) -> None:
    """With sequence parallelism, the checksums of the gradients are equal all the same: the gradients are summed."""
    run_ranks(other_batch_worker, cluster.address, uuid.uuid4().hex, world, place, count=world.size)


def unsummed_worker(rank: int, address: str, run: str) -> None:
    world, waits = shardwell.World(tp=2), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here", waits=waits) as session:
        mesh = session.replica_mesh()
        torch.manual_seed(0)
        model = Transformer("head norms")
        plan = plan_tensor_parallel(model, 2)
        for layer in plan.layers:
            if layer.style == "partial":  # as in a plan by hand that forgets the norms of queries and keys
                del plan.styles[layer.name]
        shardwell.auto_wrap(plan.apply(model, mesh["tp"]), session)
        step = next(session.steps(1))
        with pytest.raises(shardwell.ConflictError, match=r"'blocks.0.attn.q_norm.weight': rank 1 .* and rank 0"):
            for tokens, targets in step.batches(batch):
                functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        assert session.step == 0
    gloo.leave()


def test_a_plan_that_forgets_to_sum_gradients_is_an_error_in_the_first_step(cluster: shardwell.LocalCluster) -> None:
    run_ranks(unsummed_worker, cluster.address, uuid.uuid4().hex)
