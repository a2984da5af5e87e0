"""Teaches a small transformer to sort digits by reinforcement learning (GRPO), with engines that follow the run.

    python examples/rl.py

Two trainers share each step. Two rollout engines, processes without a rank, load the newest version that is committed,
let the model sort random digits, and leave the rollouts in files, with the exact version and its log-probabilities. The
trainers weight the rollouts by the probabilities of their own version against those.

In the first run a trainer and an engine get SIGKILL and are started again. The second run has no kills. Its engines
make each rollout again with the version that the first run has recorded. Both runs end with the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from gpt import GPT, GPTConfig
from torch import Tensor

import shardwell
from shardwell.processes.launch import TrainerProcess
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE

NUM_DIGITS = 4
"""Digits of a prompt. The answer has as many."""
SEPARATOR = 10
"""Token between prompt and answer. The digits are tokens 0 to 9."""
NUM_PROMPTS, GROUP_SIZE = 32, 8
"""Prompts per rank and step, and answers to each. An answer is compared with the others of its group."""
NUM_RANKS = 2
MAX_LAG = 2
"""Versions by which rollouts may be behind the step that learns from them."""
CLIP = 0.2


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(
        GPTConfig(vocab_size=SEPARATOR + 1, context=2 * NUM_DIGITS + 1, num_layers=2, num_heads=2, width=64, tied=False)
    )


def rewards_of(tokens: Tensor) -> Tensor:
    """Returns the share of right digits in each answer. [num_answers, length] -> [num_answers]"""
    wanted = tokens[:, :NUM_DIGITS].sort(1).values
    return (tokens[:, NUM_DIGITS + 1 :] == wanted).float().mean(1)


# ---- trainers ----


def train(options: argparse.Namespace) -> None:
    with shardwell.join(seed=0, keep_versions=MAX_LAG) as session:
        model = make_model()
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
        for step in session.steps(options.steps):
            for tokens, log_probs in step.batches(lambda step, dp_rank: wait_for_rollouts(options, step, dp_rank)):
                grpo_loss(model, tokens, log_probs).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()


def grpo_loss(model: GPT, tokens: Tensor, log_probs: Tensor) -> Tensor:
    """Returns the clipped loss of GRPO, with importance weights from the version that has written the answers.

    Args:
        model: The model of this step's version.
        tokens: Prompts and answers. [num_prompts * GROUP_SIZE, length]
        log_probs: Log-probabilities of the answers' tokens in their version. [num_prompts * GROUP_SIZE, NUM_DIGITS]
    """
    rewards = rewards_of(tokens).view(-1, GROUP_SIZE)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-2)
    advantages = advantages.view(-1, 1)
    logits = model(tokens[:, :-1])[:, NUM_DIGITS:, :SEPARATOR]
    ratios = (logits.log_softmax(-1).gather(2, tokens[:, NUM_DIGITS + 1 :, None])[..., 0] - log_probs).exp()
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


# ---- rollouts ----


def rollout_file(folder: str, step: int, dp_rank: int) -> Path:
    return Path(folder) / f"{step:05}-{dp_rank}.npz"


def wait_for_rollouts(options: argparse.Namespace, step: int, dp_rank: int) -> tuple[Tensor, Tensor]:
    """Returns the rollouts of a rank in a step. They are in a file: a trainer that takes over gets the same."""
    file = rollout_file(options.folder, step, dp_rank)
    while not file.exists():
        time.sleep(0.005)
    with np.load(file) as found:
        return torch.from_numpy(found["tokens"]), torch.from_numpy(found["log_probs"])


def roll_out(options: argparse.Namespace) -> None:
    """Writes the rollouts of one rank, those of a killed engine excepted."""
    model = make_model()
    with attach(model) as reader:
        for step in range(options.steps):
            file = rollout_file(options.folder, step, options.dp_rank)
            if file.exists():
                continue
            if options.replay:
                with np.load(rollout_file(options.replay, step, options.dp_rank)) as recorded:
                    version = int(recorded["version"])
                shardwell.engines.load_weights(reader, lambda pairs: model.load_state_dict(dict(pairs)), version)
            else:
                reader.wait_for(max(0, step - MAX_LAG), timeout_s=60.0)
                version = reader.follow(model)
            tokens, log_probs = sort_digits(model, torch.Generator().manual_seed(NUM_RANKS * step + options.dp_rank))
            partial = file.with_suffix(".part")
            with partial.open("wb") as output:
                np.savez(output, tokens=tokens.numpy(), log_probs=log_probs.numpy(), version=np.array(version))
            partial.rename(file)  # a killed engine leaves a whole file or none


def attach(model: GPT) -> shardwell.Reader:
    """Attaches to the run as soon as it has all weights of the model, for which it waits at most two minutes."""
    deadline = time.monotonic() + 120.0
    while True:
        with ExitStack() as attempt:
            try:
                reader = attempt.enter_context(shardwell.attach())
                reader.follow(model)
                attempt.pop_all()
                return reader
            except (shardwell.errors.NotFoundError, shardwell.errors.StepStateError, shardwell.UsageError):
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.1)


@torch.no_grad()
def sort_digits(model: GPT, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns prompts with sampled answers, and the log-probabilities of the answers' tokens."""
    prompts = torch.randint(0, SEPARATOR, (NUM_PROMPTS, NUM_DIGITS), generator=generator)
    tokens = torch.cat([prompts, torch.full((NUM_PROMPTS, 1), SEPARATOR)], 1).repeat_interleave(GROUP_SIZE, 0)
    log_probs = []
    for _ in range(NUM_DIGITS):
        next_log_probs = model(tokens)[:, -1, :SEPARATOR].log_softmax(-1)
        chosen = torch.multinomial(next_log_probs.exp(), 1, generator=generator)
        log_probs.append(next_log_probs.gather(1, chosen))
        tokens = torch.cat([tokens, chosen], 1)
    return tokens, torch.cat(log_probs, 1)


# ---- both runs ----


def run(options: argparse.Namespace, folder: Path, *, replay: Path | None = None) -> str:
    """Trains once; returns the digest of the final weights. Kills a trainer and an engine, unless it is a replay."""
    folder.mkdir()
    with shardwell.LocalCluster(num_shards=2, lease_s=5.0) as cluster:
        common = [sys.executable, __file__, f"--steps={options.steps}", f"--folder={folder}"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SHARDWELL_ADDRESS": cluster.address,
            TOKEN_FILE_VARIABLE: cluster.token_file,
            "SHARDWELL_RUN": "sort",
            "SHARDWELL_DP": str(NUM_RANKS),
        }
        processes = {}
        for rank in range(NUM_RANKS):
            name = f"trainer-{rank}"
            command = [*common, "--role=trainer"]
            processes[name] = TrainerProcess(name, command, {**environment, "SHARDWELL_TRAINER": name})
            name, command = f"engine-{rank}", [*common, "--role=engine", f"--dp-rank={rank}"]
            command += [f"--replay={replay}"] if replay else []
            processes[name] = TrainerProcess(name, command, environment)
        try:
            return watch(options, folder, cluster, processes, kills=replay is None)
        finally:
            for process in processes.values():
                process.kill()
                process.finish()


def watch(
    options: argparse.Namespace,
    folder: Path,
    cluster: shardwell.LocalCluster,
    processes: dict[str, TrainerProcess],
    *,
    kills: bool,
) -> str:
    """Prints rewards and kills processes until the last step; returns the digest of the weights."""
    victims = {options.steps // 3: "trainer-1", 2 * options.steps // 3: "engine-1"} if kills else {}
    wait_until(lambda: rollout_file(str(folder), 0, 0).exists(), processes)  # the run exists
    with shardwell.attach(cluster.address, "sort", token_file=cluster.token_file) as reader:
        for step in range(1, options.steps + 1):
            wait_until(lambda: reader.version >= step, processes)  # noqa: B023 (called at once)
            if step in victims:
                victim = processes[victims[step]]
                victim.kill()
                victim.finish()
                victim.start()
                print(f"step {step:4}  SIGKILL to {victim.name}, which is started again", flush=True)
            if step % max(1, options.steps // 12) == 0:
                print(describe(folder, step - 1), flush=True)
        return reader.digest()


def describe(folder: Path, step: int) -> str:
    rewards, lags = [], []
    for rank in range(NUM_RANKS):
        with np.load(rollout_file(str(folder), step, rank)) as found:
            rewards.append(rewards_of(torch.from_numpy(found["tokens"])).mean().item())
            lags.append(step - int(found["version"]))
    return f"step {step + 1:4}  right digits {np.mean(rewards):6.1%}  rollouts {lags} versions old"


def wait_until(condition: Callable[[], bool], processes: dict[str, TrainerProcess]) -> None:
    while not condition():
        failed = [name for name, process in processes.items() if process.exit_code not in (None, 0)]
        if failed:
            raise SystemExit(f"{', '.join(failed)} failed")
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description="Teaches a small transformer to sort digits.")
    parser.add_argument("--steps", type=int, default=120, help="steps of each of the two runs (default: 120)")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--replay", help=argparse.SUPPRESS)
    parser.add_argument("--dp-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 6:
        parser.error(f"--steps {options.steps}: expected at least 6, because two processes are killed")
    torch.set_num_threads(1)
    if options.role:
        (train if options.role == "trainer" else roll_out)(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"
        print("run 1: a trainer and an engine are killed", flush=True)
        killed = run(options, first)
        print("run 2: no kills; the engines repeat the rollouts of run 1 by their versions", flush=True)
        replayed = run(options, second, replay=first)
        files = sorted(file.name for file in first.glob("*.npz"))
        equal = sum((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    print(f"{equal} of {len(files)} files of rollouts are equal")
    print(f"SHA-256 of the weights of run 1: {killed}\nSHA-256 of the weights of run 2: {replayed}")
    print("every bit of the weights is equal" if killed == replayed else "THE WEIGHTS DIFFER")
    return 0 if killed == replayed and equal == len(files) else 1


if __name__ == "__main__":
    sys.exit(main())
