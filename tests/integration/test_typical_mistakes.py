"""Typical mistakes of users who move a script to Shardwell, each with the sentence of its answer that says what to do.

``test_advice.py`` follows the advice of some of these answers.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as PolicyOfTorch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import shardwell
import shardwell.testing
from shardwell.errors import (
    CorruptDataError,
    FreedParameterError,
    RunMismatchError,
    StaleEpochError,
    StepStateError,
    UnitMismatchError,
    UsageError,
)


class Script:
    """What a training script has made before the mistake."""

    def __init__(self, session: shardwell.Session) -> None:
        self.session = session
        self.model = make_model()
        shardwell.auto_wrap(self.model, session)
        self.optimizer: Any = shardwell.optim.AdamW(self.model.parameters(), lr=0.1)
        self.parameter: Any = self.model[0].weight

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(2, 4)).sum()
        return loss

    def train(self, num_steps: Any = 1) -> None:
        for step in self.session.steps(num_steps):
            self.compute(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def compute(self, step: Any, source: Any = None, **options: Any) -> None:
        for batch in step.batches(make_batch if source is None else source, **options):
            self.model(batch).sum().backward()

    def each_step(self, body: Callable[[Any], object]) -> None:
        for step in self.session.steps(2):
            body(step)
            self.optimizer.step()

    def each_batch(self, body: Callable[[Any, Any], object]) -> None:
        self.each_step(lambda step: [body(step, batch) for batch in step.batches(make_batch)])

    def join_again(self, model: nn.Module, optimizer: Any = shardwell.optim.AdamW, **arguments: Any) -> None:
        """Restarts the script with another model or optimizer."""
        self.train()
        self.session.close()
        with shardwell.join(run=self.session.run, **arguments) as session:
            shardwell.auto_wrap(model, session)
            restarted = optimizer(model.parameters(), lr=0.1)
            model(torch.ones(2, 4)).sum().backward()
            restarted.step()


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def make_batch(step: int, dp_rank: int) -> torch.Tensor:
    return torch.ones(2, 4)


_NUMBERS = itertools.count()
SAMPLES: Any = [torch.ones(4)] * 8
UNTYPED_SESSION: Callable[[Any], Any] = attrgetter("session")
UNTYPED: Any = shardwell
"""Calls that a type checker would find."""


class WithoutForward(nn.Module):
    """An agent, whose script calls other methods."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(4, 2)


def after_close(use: Callable[[Script], object]) -> Callable[[Script], object]:
    def mistake(at: Script) -> object:
        at.train()
        at.session.close()
        return use(at)

    return mistake


def backward_outside_of_the_batches(at: Script) -> None:
    def body(step: Any) -> None:
        at.loss().backward()
        at.compute(step)

    at.each_step(body)


def backward_after_the_batches(at: Script) -> None:
    def body(step: Any) -> None:
        losses = [at.model(batch).sum() for batch in step.batches(make_batch)]
        losses[0].backward()

    at.each_step(body)


def two_loops_in_a_step(at: Script) -> None:
    def body(step: Any) -> None:
        at.compute(step)
        at.compute(step)

    at.each_step(body)


def two_commits_in_a_step(at: Script) -> None:
    def body(step: Any) -> None:
        at.compute(step)
        at.optimizer.step()

    at.each_step(body)


def optimizer_of_torch_in_the_loop(at: Script) -> None:
    optimizer = torch.optim.AdamW(at.model.parameters(), lr=0.1)
    for step in at.session.steps(1):
        at.compute(step)
        optimizer.step()


def accumulation_over_steps(at: Script) -> None:
    for step in at.session.steps(4):
        at.compute(step)
        if step.number % 2:
            at.optimizer.step()


def optimizer_made_first(at: Script) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwell.fully_shard(model, at.session)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def weights_in_place(at: Script) -> None:
    at.model.unshard()
    with torch.no_grad():
        at.parameter.add_(1)
    at.model.reshard()
    at.loss().backward()


def replaced_weight(at: Script) -> None:
    at.model[0].weight = nn.Parameter(torch.zeros(4, 4))
    at.train()


def gradient_by_hand(at: Script) -> None:
    at.loss().backward()
    at.parameter.grad = torch.zeros(4, 4)


def child_after_parent(at: Script) -> None:
    model = make_model()
    shardwell.fully_shard(model, at.session)
    shardwell.fully_shard(model[0], at.session)


def parameters_of_two_sessions(at: Script) -> None:
    with shardwell.join(run=f"{at.session.run}-2") as other:
        model = shardwell.fully_shard(nn.Linear(2, 2), other)
        shardwell.optim.SGD([*at.model.parameters(), *model.parameters()], lr=0.1)


def sharded_in_two_sessions(at: Script) -> None:
    with shardwell.join(run=f"{at.session.run}-2") as other:
        shardwell.auto_wrap(at.model, other)


def follow_a_sharded_model(at: Script) -> None:
    with shardwell.attach(run=at.session.run) as reader:
        reader.follow(at.model)


def load_a_file_of_torch(at: Script) -> None:
    torch.save(make_model().state_dict(), "model.pt")
    shardwell.from_safetensors(make_model(), "model.pt")


def resume_a_file_of_torch(at: Script) -> None:
    torch.save(make_model().state_dict(), "model.pt")
    shardwell.join(run="resumed", resume=str(Path("model.pt").absolute()))


def optimizer_state_of_another_run(at: Script) -> None:
    at.train()
    saved = at.optimizer.state_dict()
    with shardwell.join(run=f"{at.session.run}-2") as other:
        model = shardwell.auto_wrap(make_model(), other)
        shardwell.optim.AdamW(model.parameters(), lr=0.1).load_state_dict(saved)


def optimizer_state_of_torch(at: Script) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    at.optimizer.load_state_dict(optimizer.state_dict())


def scaler_of_torch(at: Script) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(at.loss()).backward()
    scaler.step(at.optimizer)


def loss_of_an_earlier_step(at: Script) -> None:
    loss = at.loss()
    at.loss().backward()
    at.optimizer.step()
    loss.backward()


def clipped_too_early(at: Script) -> None:
    at.optimizer.clip_grad_norm_(1.0)
    at.loss().backward()
    at.optimizer.step()


def clipped_by_torch(at: Script) -> None:
    at.loss().backward()
    nn.utils.clip_grad_norm_(at.model.parameters(), 1.0)


def not_finite(at: Script) -> None:
    (at.loss() * float("nan")).backward()
    at.optimizer.step()


def optimizer_of_a_new_model(at: Script) -> None:
    at.model = make_model()
    at.loss().backward()
    at.optimizer.step()


def loader(samples: Any = SAMPLES, batch_size: int = 2, **options: Any) -> Any:
    return DataLoader(samples, batch_size=batch_size, **options)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(SAMPLES)


class Unsized(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return SAMPLES[index]


def with_lr(value: Any) -> Callable[[Script], object]:
    def mistake(at: Script) -> object:
        at.optimizer.param_groups[0]["lr"] = value
        return at.train()

    return mistake


def layer_after_the_first_step(at: Script) -> None:
    at.train()
    at.model.append(shardwell.fully_shard(nn.Linear(2, 2), at.session))


def batches_left_early(at: Script) -> None:
    with shardwell.join(run=f"{at.session.run}-2", world=shardwell.World(dp=2), min_trainers=1) as session:
        at = Script(session)
        for step in session.steps(1):
            for batch in step.batches(make_batch):
                at.model(batch).sum().backward()
                break
            at.optimizer.step()


def closed_in_the_loop(at: Script) -> None:
    at.each_step(lambda step: (at.compute(step), at.session.close()))


def average_without_a_decay(at: Script) -> None:
    at.train()
    shardwell.full_state_dict(at.model, ema=True)


def published_without_kept_versions(at: Script) -> None:
    at.train()
    at.session.publish("best")


def batches(source: Any, **options: Any) -> Callable[[Script], object]:
    return lambda at: at.each_step(lambda step: at.compute(step, source, **options))


FUNCTION = r"step\.batches takes a function \(step, dp_rank\) -> batch, a DataLoader, or a dataset with batch_size="
NO_STEP = (
    r"Call it in every step, on an optimizer of the sharded model, such as shardwell\.optim\.AdamW\(model\.parameters"
    r"\(\)\)\. To skip the gradient of a batch call optimizer\.zero_grad\(\) and then optimizer\.step\(\)\. To "
    r"accumulate gradients, call backward\(\) for each micro-batch inside the loop over step\.batches$"
)
FREED = (
    r"Values are available during forwards of modules that contain the parameter, in methods that shardwell\."
    r"register_forward_method\(module, name\) has made forwards, and between module\.unshard\(\) and "
    r"module\.reshard\(\); shardwell\.full_state_dict\(model\) returns all of them\."
)
JOIN_AGAIN = r"join again with shardwell\.join, and shard a model that is constructed again$"
OTHER_RUN = r"every trainer must build the same model, and another model needs another run$"
SAVE = r"use shardwell\.full_state_dict\(model\), or shardwell\.save_safetensors\(model, folder\)"

NUMBER = r"^the step of `for step in session\.steps\(\.\.\.\)` was used as a number: use step\.number, which is 0$"

MISTAKES: dict[str, tuple[Callable[[Script], object], type[Exception], str]] = {
    # ---- join ----
    "join: a number as world": (
        lambda at: UNTYPED.join(world=2),
        UsageError,
        r"^world=2: expected a World, such as shardwell\.World\(dp=2\)$",
    ),
    "join: a run as address": (
        lambda at: shardwell.join("gpt"),
        UsageError,
        r"^'gpt' is not an address: expected HOST:PORT, such as localhost:50051$",
    ),
    "join: a URL as address": (
        lambda at: shardwell.join("http://localhost:50051"),
        UsageError,
        r"expected HOST:PORT, such as localhost:50051$",
    ),
    "join: resume without a folder": (
        lambda at: shardwell.join(run="resumed", resume="latest"),
        UsageError,
        r"^resume='latest' needs checkpoint_dir: name the folder with the run's checkpoints$",
    ),
    "join: resume a file of torch": (
        resume_a_file_of_torch,
        CorruptDataError,
        r"model\.pt contains no complete checkpoint: manifest\.json is missing$",
    ),
    "join: options as a dict": (
        lambda at: UNTYPED.join(transfers={"push_dtype": "bfloat16"}),
        UsageError,
        r"expected shardwell\.TransferOptions\(\.\.\.\)$",
    ),
    "join: another seed": (
        lambda at: at.join_again(make_model(), seed=7),
        RunMismatchError,
        r"has seed=0, but this trainer asks for seed=7: use the value of the run, or another run name$",
    ),
    "join: another world": (
        lambda at: at.join_again(make_model(), world=shardwell.World(dp=2)),
        RunMismatchError,
        r"use the value of the run, or another run name$",
    ),
    "join: a rank outside of the world": (
        lambda at: shardwell.join(run="outside", global_rank=5),
        shardwell.errors.WorldError,
        r"expected 0 <= rank < 1$",
    ),
    "join: more trainers than ranks": (
        lambda at: shardwell.join(run="many", world=shardwell.World(dp=2), min_trainers=5),
        shardwell.errors.WorldError,
        r"^min_trainers=5: expected 1 to 2, the size of World\(dp=2, ",
    ),
    "join: a world without ranks": (
        lambda at: shardwell.World(dp=0),
        shardwell.errors.WorldError,
        r"^World\(dp=0\): expected an integer of at least 1$",
    ),
    "join: checkpoints without a folder": (
        lambda at: shardwell.join(run="no-folder", checkpoint_every=2),
        shardwell.errors.InvalidRequestError,
        r"but the run has no folder for checkpoints: set checkpoint_dir$",
    ),
    "join: a dtype of torch": (
        lambda at: UNTYPED.TransferOptions(push_dtype=torch.bfloat16),
        UsageError,
        r"^push_dtype=torch\.bfloat16: expected a text$",
    ),
    "join: an unknown dtype": (
        lambda at: shardwell.TransferOptions(push_dtype="bf16"),
        UsageError,
        r"^push_dtype='bf16': expected one of float32, bfloat16, float16, ",
    ),
    "join: publish without kept versions": (
        published_without_kept_versions,
        shardwell.errors.CapacityError,
        r"keeps 0 older versions: create a new run with join\(keep_versions=1\)$",
    ),
    "attach: a run that does not exist": (
        lambda at: shardwell.attach(run="nosuch"),
        shardwell.NotFoundError,
        r"^run 'nosuch' does not exist; existing runs: ",
    ),
    "attach: a sharded model": (
        follow_a_sharded_model,
        UsageError,
        r"pass a plain model, built without fully_shard$",
    ),
    # ---- sharding ----
    "shard: no session": (
        lambda at: UNTYPED.fully_shard(nn.Linear(2, 2), None),
        UsageError,
        r"expected the session that shardwell\.join\(\.\.\.\) returned$",
    ),
    "shard: a class": (
        lambda at: UNTYPED.auto_wrap(nn.Linear, at.session),
        UsageError,
        r"expected a module, got type: fully_shard takes one module or several, auto_wrap a model$",
    ),
    "shard: twice": (
        lambda at: shardwell.auto_wrap(at.model, at.session),
        UsageError,
        r"call fully_shard or auto_wrap once for each module\.",
    ),
    "shard: in two sessions": (
        sharded_in_two_sessions,
        UsageError,
        r"for another run or session construct the model again$",
    ),
    "shard: a child after its parent": (
        child_after_parent,
        UsageError,
        r"call fully_shard bottom-up, for inner modules before the modules that contain them$",
    ),
    "shard: a list of modules": (
        lambda at: shardwell.auto_wrap(nn.ModuleList([nn.Linear(2, 2)]), at.session),
        UsageError,
        r"shard the modules in it, for part in model\.children\(\): shardwell\.auto_wrap\(part, session\)\.",
    ),
    "shard: a module without a forward": (
        lambda at: shardwell.auto_wrap(WithoutForward(), at.session),
        UsageError,
        r"If the module has parameters of its own, give its class a forward, such as one of its other methods, and "
        r"after sharding call shardwell\.register_forward_method\(model, name\) for each method that is called$",
    ),
    "shard: a policy of FSDP1": (
        lambda at: UNTYPED.auto_wrap(make_model(), at.session, lambda module, recurse, **options: True),
        UsageError,
        r"expected a policy such as SizePolicy\(min_num_params=1_000_000\), ModuleTypePolicy\(\{Block\}\), ",
    ),
    "shard: a class as policy": (
        lambda at: UNTYPED.ModuleTypePolicy(nn.Linear),
        UsageError,
        r"expected classes of modules, such as ModuleTypePolicy\(\{Block\}\)$",
    ),
    "shard: classes as policy of auto_wrap": (
        lambda at: UNTYPED.auto_wrap(make_model(), at.session, policy={nn.Linear}),
        UsageError,
        r"expected a policy such as SizePolicy\(min_num_params=1_000_000\), ModuleTypePolicy\(\{Block\}\), ",
    ),
    "shard: a strategy by name": (
        lambda at: UNTYPED.fully_shard(nn.Linear(2, 2), at.session, strategy="FULL_SHARD"),
        UsageError,
        r"expected one of ShardingStrategy\.FULL_SHARD, ",
    ),
    "shard: a number of ranks": (
        lambda at: UNTYPED.fully_shard(nn.Linear(2, 2), at.session, reshard_after_forward=2),
        UsageError,
        r"FSDP2's number of ranks corresponds to ShardingStrategy\.HYBRID_SHARD, one copy per host$",
    ),
    "shard: a dtype as policy": (
        lambda at: UNTYPED.fully_shard(nn.Linear(2, 2), at.session, mp_policy=torch.bfloat16),
        UsageError,
        r"expected a policy of Shardwell, such as shardwell\.MixedPrecisionPolicy\(param_dtype=torch\.bfloat16\)$",
    ),
    "shard: FSDP2's policy": (
        lambda at: UNTYPED.fully_shard(nn.Linear(2, 2), at.session, mp_policy=PolicyOfTorch(torch.bfloat16)),
        UsageError,
        r"expected a policy of Shardwell, such as shardwell\.MixedPrecisionPolicy\(param_dtype=torch\.bfloat16\)$",
    ),
    "shard: a dtype by name": (
        lambda at: UNTYPED.MixedPrecisionPolicy(param_dtype="bfloat16"),
        UsageError,
        r"expected one of torch\.float32, torch\.float64, torch\.bfloat16, torch\.float16, or None$",
    ),
    # ---- weights ----
    "weights: read": (lambda at: at.parameter.sum(), FreedParameterError, FREED),
    "weights: written": (lambda at: at.parameter.data.zero_(), FreedParameterError, FREED),
    "weights: to numpy": (lambda at: at.parameter.detach().numpy(), FreedParameterError, FREED),
    "weights: a penalty": (
        lambda at: at.loss() + sum(parameter.square().sum() for parameter in at.model.parameters()),
        FreedParameterError,
        FREED,
    ),
    "weights: initialised later": (
        lambda at: nn.init.xavier_uniform_(at.parameter),
        FreedParameterError,
        r"initialise before fully_shard, or pass an init function as fully_shard\(\.\.\., source=function\)$",
    ),
    "weights: replaced": (replaced_weight, UsageError, r"change parameters before fully_shard$"),
    "weights: another dtype": (
        lambda at: at.model.half(),
        UsageError,
        r"convert or move the module first\. To compute in another dtype pass fully_shard\(\.\.\., mp_policy="
        r"shardwell\.MixedPrecisionPolicy\(param_dtype=\.\.\.\)\)$",
    ),
    "weights: copied": (
        lambda at: copy.deepcopy(at.model),
        UsageError,
        r"Copy before fully_shard, or load shardwell\.full_state_dict\(model\) into another model\.",
    ),
    "weights: averaged by torch": (
        lambda at: torch.optim.swa_utils.AveragedModel(at.model),
        UsageError,
        r"set optimizer\.ema_decay = 0\.999: the servers keep the average$",
    ),
    "weights: a gradient by hand": (
        gradient_by_hand,
        UsageError,
        r"call optimizer\.zero_grad\(\) to drop the step's gradients, or use module\.set_requires_gradient_sync"
        r"\(False\)",
    ),
    # ---- saving and loading ----
    "save: state_dict": (lambda at: torch.save(at.model.state_dict(), "model.pt"), UsageError, SAVE),
    "save: state_dict of a part": (lambda at: at.model[0].state_dict(), UsageError, SAVE),
    "save: the model": (
        lambda at: torch.save(at.model, "model.pt"),
        UsageError,
        r"load shardwell\.full_state_dict\(model\) into another model\.",
    ),
    "save: a checkpoint without a folder": (
        lambda at: at.session.save_checkpoint(),
        StepStateError,
        r"pass checkpoint_dir to shardwell\.join in a trainer$",
    ),
    "load: a state_dict": (
        lambda at: at.model.load_state_dict(make_model().state_dict()),
        UsageError,
        r"load before fully_shard, or call fully_shard\(\.\.\., source=shardwell\.from_safetensors\(model, path\)\)",
    ),
    "load: a state_dict as source": (
        lambda at: UNTYPED.fully_shard(nn.Linear(2, 2), at.session, source=nn.Linear(2, 2).state_dict()),
        UsageError,
        r"expected shardwell\.from_safetensors\(model, path\), shardwell\.init\.drawn\(model\), or a function\. Load a "
        r"state_dict by model\.load_state_dict, before fully_shard$",
    ),
    "load: a file of torch": (
        load_a_file_of_torch,
        CorruptDataError,
        r"is a file of torch\.save, not a safetensors file: call model\.load_state_dict\(torch\.load\(path\)\) before "
        r"fully_shard, or convert the file with safetensors\.torch\.save_file$",
    ),
    "load: an optimizer of another run": (
        optimizer_state_of_another_run,
        UsageError,
        r"To continue, join the former run again, or on another cluster resume a checkpoint of it: shardwell\.join\("
        r"checkpoint_dir=\.\.\., resume='latest'\)\. To load the hyper-parameters and start with new state, load ",
    ),
    "load: an optimizer of torch": (
        optimizer_state_of_torch,
        UsageError,
        r"joining the run again restores it\. To load the hyper-parameters only, load ",
    ),
    # ---- optimizers ----
    "optimizer: torch's": (
        lambda at: torch.optim.SGD(at.model.parameters(), lr=0.1).step(),
        UsageError,
        r"Use shardwell\.optim\.SGD$",
    ),
    "optimizer: made before the sharding": (optimizer_made_first, UsageError, r"Use shardwell\.optim\.SGD$"),
    "optimizer: of a plain model": (
        lambda at: shardwell.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),
        UsageError,
        r"call fully_shard\(model, session\) first, or use torch\.optim for local parameters$",
    ),
    "optimizer: with a plain parameter": (
        lambda at: at.optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}),
        UsageError,
        r"call fully_shard on the whole model before making the optimizer$",
    ),
    "optimizer: of two sessions": (parameters_of_two_sessions, UsageError, r"use one optimizer per session$"),
    "optimizer: another class after a restart": (
        lambda at: at.join_again(make_model(), shardwell.optim.SGD),
        shardwell.ConflictError,
        r"already has 'adamw' state in this run: to train it with 'sgd', start a new run$",
    ),
    "optimizer: LBFGS": (
        lambda at: torch.optim.LBFGS(at.model.parameters()).step(at.loss),  # type: ignore[arg-type]
        UsageError,
        r"Use an optimizer of shardwell\.optim: none of them evaluates the model several times in a step$",
    ),
    "optimizer: torch's clipping": (
        clipped_by_torch,
        UsageError,
        r"call optimizer\.clip_grad_norm_\(max_norm\), which clips by the norm over all gradients, or ",
    ),
    "optimizer: clipping with the parameters": (
        lambda at: at.optimizer.clip_grad_norm_(at.model.parameters(), 1.0),
        UsageError,
        r"expected the largest norm, a positive number, and no parameters: optimizer\.clip_grad_norm_\(1\.0\)$",
    ),
    "optimizer: clipping values with the parameters": (
        lambda at: at.optimizer.clip_grad_value_(at.model.parameters(), 1.0),
        UsageError,
        r"expected a positive number, and no parameters: optimizer\.clip_grad_value_\(0\.5\)$",
    ),
    "optimizer: clipping before the backward": (
        clipped_too_early,
        UsageError,
        r"call optimizer\.step\(\) to commit the step, or optimizer\.zero_grad\(\) to drop its gradient and compute ",
    ),
    "optimizer: torch's scaler": (scaler_of_torch, UsageError, r"use shardwell\.amp\.GradScaler$"),
    "optimizer: no backward": (
        lambda at: at.optimizer.step(),
        UsageError,
        r"Run the model and loss\.backward\(\) first\. To commit a step without gradients, call optimizer\.zero_grad\("
        r"\) right before optimizer\.step\(\)$",
    ),
    "optimizer: a backward of another model": (
        optimizer_of_a_new_model,
        UsageError,
        r"Run the model and loss\.backward\(\) first\.",
    ),
    "optimizer: NaN": (
        not_finite,
        shardwell.NonFiniteError,
        r"to skip the step, call optimizer\.zero_grad\(\) on every trainer, then optimizer\.step\(\)$",
    ),
    "optimizer: a tensor of rates": (
        with_lr(torch.tensor([0.1, 0.2])),
        UsageError,
        r"^a parameter group of AdamW has lr=tensor\(\[0\.1000, 0\.2000\]\): expected a number$",
    ),
    "optimizer: no rate": (with_lr(None), UsageError, r"has lr=None: expected a number$"),
    "optimizer: a text as rate": (with_lr("0.1"), UsageError, r"has lr='0\.1': expected a number$"),
    "optimizer: a negative rate": (
        with_lr(-1.0),
        shardwell.errors.InvalidRequestError,
        r"lr=-1\.0: expected at least 0$",
    ),
    "optimizer: an average without a decay": (
        average_without_a_decay,
        StepStateError,
        r"has no moving average: set optimizer\.ema_decay before a step$",
    ),
    "optimizer: a decay above 1": (
        lambda at: setattr(at.optimizer, "ema_decay", 2.0),
        UsageError,
        r"^ema_decay=2\.0: expected 0 to 1, or None$",
    ),
    # ---- the loop ----
    "loop: the step as a number": (
        lambda at: at.each_step(lambda step: step % 10),
        UsageError,
        NUMBER,
    ),
    "loop: the step compared with a number": (
        lambda at: at.each_step(lambda step: step == 0),
        UsageError,
        NUMBER,
    ),
    "loop: a number divided by the step": (
        lambda at: at.each_step(lambda step: 1000 % step),
        UsageError,
        NUMBER,
    ),
    "loop: the step formatted as a number": (
        lambda at: at.each_step(lambda step: f"{step:3d}"),
        UsageError,
        NUMBER,
    ),
    "loop: numbers logged with the session": (
        lambda at: at.each_batch(lambda step, batch: UNTYPED_SESSION(at).log(loss=1.0)),
        AttributeError,
        r"^a Session has no 'log': use step\.log in `for step in session\.steps\(\.\.\.\)`$",
    ),
    "loop: a loader as number of steps": (
        lambda at: at.train(loader()),
        UsageError,
        r"expected the number of all steps of the run, session\.steps\(1000\), or a DataLoader and all its epochs, "
        r"session\.steps\(loader, epochs=3\)$",
    ),
    "loop: epochs of a stream": (
        lambda at: at.session.steps(loader(Stream()), epochs=2).__next__(),
        UsageError,
        r"has no known number of steps: pass the number of all steps, session\.steps\(1000\)$",
    ),
    "loop: epochs as text": (
        lambda at: UNTYPED_SESSION(at).steps(loader(), epochs="3").__next__(),
        UsageError,
        r"^steps\(epochs='3'\): expected the number of all epochs of the run, at least 1$",
    ),
    "loop: no epochs": (
        lambda at: at.session.steps(loader(), epochs=0).__next__(),
        UsageError,
        r"^steps\(epochs=0\): expected the number of all epochs of the run, at least 1$",
    ),
    "loop: epochs of a dataset without a length": (
        lambda at: at.session.steps(loader(Unsized()), epochs=2).__next__(),
        UsageError,
        r"of a dataset without a length, .* pass the number of all steps, session\.steps\(1000\)$",
    ),
    "loop: epochs of a number of steps": (
        lambda at: at.session.steps(4, epochs=2).__next__(),
        UsageError,
        r"^steps\(4, epochs=2\): expected the number of all steps of the run, session\.steps\(1000\), or a DataLoader",
    ),
    "loop: epochs of a DistributedSampler": (
        lambda at: at.session.steps(loader(sampler=DistributedSampler(SAMPLES, 1, 0)), epochs=1).__next__(),
        UsageError,
        r"Pass DataLoader\(dataset, batch_size=\.\.\., shuffle=True\), or your own choice of samples as a function ",
    ),
    "loop: an epoch without a step": (
        lambda at: at.session.steps(loader(batch_size=16, drop_last=True), epochs=1).__next__(),
        UsageError,
        r"^the dataset has 8 samples; a step takes batch_size 16 x dp 1$",
    ),
    "loop: the epoch of a number of steps": (
        lambda at: at.each_step(lambda step: step.ends_epoch),
        UsageError,
        r"use session\.steps\(loader, epochs=\.\.\.\), or divide step\.number by the number of steps of an epoch$",
    ),
    "loop: batches of the step only": (
        batches(lambda step: torch.ones(2, 4)),
        UsageError,
        r"with \(step, dp_rank\): too many positional arguments$",
    ),
    "loop: batches without arguments": (
        batches(lambda: torch.ones(2, 4)),
        UsageError,
        r"^step\.batches calls the function .* with \(step, dp_rank\): too many positional arguments$",
    ),
    "loop: an enumeration": (
        batches(enumerate(SAMPLES)),
        UsageError,
        r"pass an iterable, whose __iter__ starts again, or a function dp_rank -> iterable$",
    ),
    "loop: batches that are left early": (
        batches_left_early,
        UsageError,
        r"^step 0: the work of logical rank 1 was not computed: run `for batch in step\.batches\(\.\.\.\)` to its end ",
    ),
    "loop: a session that is closed": (
        closed_in_the_loop,
        StaleEpochError,
        r"join again with shardwell\.join, and shard ",
    ),
    "loop: a layer after the first step": (
        layer_after_the_first_step,
        StepStateError,
        r"declare every unit before the first step, under the same name in every trainer\.",
    ),
    "loop: track the model": (lambda at: at.session.track(model=at.model), UsageError, SAVE),
    "loop: no optimizer.step": (lambda at: [at.compute(step) for step in at.session.steps(1)], UsageError, NO_STEP),
    "loop: accumulation over steps": (accumulation_over_steps, UsageError, NO_STEP),
    "loop: torch's optimizer": (optimizer_of_torch_in_the_loop, UsageError, r"Use shardwell\.optim\.AdamW$"),
    "loop: optimizer.step in the inner loop": (
        lambda at: at.each_batch(lambda step, batch: (at.model(batch).sum().backward(), at.optimizer.step())),
        UsageError,
        r"optimizer\.step\(\) was called inside the loop over step\.batches of step 0: call it after the loop$",
    ),
    "loop: two optimizer.step": (
        two_commits_in_a_step,
        UsageError,
        r"Call it once after all backwards, with shardwell\.optim\.Combined\(\[\.\.\.\]\) for several optimizers, or "
        r"declare the number of calls: session\.steps\(num_steps, optimizer_steps=2\)$",
    ),
    "loop: two loops over batches": (
        two_loops_in_a_step,
        UsageError,
        r"Read all data of the step in one loop, such as step\.batches\(lambda step, dp_rank: \(first\(step, dp_rank\)"
        r", second\(step, dp_rank\)\)\), and evaluate on batches of your own$",
    ),
    "loop: a backward before the batches": (
        backward_outside_of_the_batches,
        UsageError,
        r"Run the backward inside that loop, or call optimizer\.zero_grad\(\) to drop the gradient$",
    ),
    "loop: a backward after the batches": (backward_after_the_batches, UsageError, r"run the forward again$"),
    "loop: a loss of an earlier step": (loss_of_an_earlier_step, UsageError, r"run the forward again$"),
    "loop: log after the batches": (
        lambda at: at.each_step(lambda step: (at.compute(step), step.log(loss=1.0))),
        UsageError,
        r"call it inside `for batch in step\.batches\(\.\.\.\)`\. In a loop without step\.batches, call it before ",
    ),
    "loop: log a text": (
        lambda at: at.each_batch(lambda step, batch: step.log(loss="low")),
        UsageError,
        r"^step\.log\(loss=\.\.\.\): expected a number or a tensor with one element, got a str$",
    ),
    "loop: track a number": (
        lambda at: at.session.track(best=1e9),
        UsageError,
        r"float has no state_dict and load_state_dict$",
    ),
    "loop: DistributedSampler": (
        batches(loader(sampler=DistributedSampler(SAMPLES, num_replicas=1, rank=0))),
        UsageError,
        r"Pass DataLoader\(dataset, batch_size=\.\.\., shuffle=True\), or your own choice of samples as a function "
        r"\(step, dp_rank\) -> batch$",
    ),
    "loop: an iterator": (
        batches(iter(loader())),
        UsageError,
        r"pass an iterable, whose __iter__ starts again, or a function dp_rank -> iterable$",
    ),
    "loop: a dataset without batch_size": (batches(SAMPLES), UsageError, FUNCTION),
    "loop: an array": (batches(numpy.ones((8, 4), numpy.float32)), UsageError, FUNCTION),
    "loop: a loader with options": (
        batches(loader(), batch_size=2),
        UsageError,
        r"the DataLoader has this setting: set it there, or pass the dataset itself, step\.batches\(loader\.dataset, ",
    ),
    # ---- restarts and the end ----
    "restart: another size": (
        lambda at: at.join_again(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))),
        UnitMismatchError,
        OTHER_RUN,
    ),
    "restart: fewer layers": (
        lambda at: at.join_again(nn.Sequential(nn.Linear(4, 4))),
        StepStateError,
        r"Another model needs a run of its own, join\(run=NAME\)$",
    ),
    "restart: units of another policy": (
        lambda at: at.join_again(nn.Sequential(*make_model(), nn.ReLU(), nn.Linear(2, 2))),
        StepStateError,
        r"call shardwell\.unwrap\(model\) before, or session\.close\(\) and shardwell\.join again; it then continues "
        r"with the run's values\.",
    ),
    "close: a forward": (after_close(lambda at: at.loss()), StaleEpochError, JOIN_AGAIN),
    "close: a loop": (after_close(lambda at: at.train(2)), StaleEpochError, JOIN_AGAIN),
    "close: optimizer.step": (after_close(lambda at: at.optimizer.step()), StaleEpochError, JOIN_AGAIN),
    "close: save": (after_close(lambda at: shardwell.full_state_dict(at.model)), StaleEpochError, JOIN_AGAIN),
    "close: shard": (
        after_close(lambda at: shardwell.auto_wrap(make_model(), at.session)),
        StaleEpochError,
        JOIN_AGAIN,
    ),
}
"""A mistake, its error, and the sentence that says what to do."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with shardwell.testing.in_process_cluster() as address:
        yield address


@pytest.fixture
def script(cluster: str) -> Iterator[Script]:
    with shardwell.join(run=f"run-{next(_NUMBERS)}") as session:
        yield Script(session)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_typical_mistake_is_answered_with_what_to_do(
    mistake: str, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, error, sentence = MISTAKES[mistake]
    with pytest.raises(error, match=sentence):
        make(script)


def test_a_loop_that_trains_another_model_is_noticed(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    script.model = make_model()
    with caplog.at_level(logging.WARNING):
        script.train(2)
    expected = (
        "step 0: no sharded module ran in the loop over step.batches, so this trainer has no gradient: train the "
    )
    assert [text for text in caplog.messages if text.startswith(expected)] == [
        f"{expected}model that auto_wrap or fully_shard got"
    ]


def test_a_second_loop_over_the_same_steps_is_noticed(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            script.train(2)
    assert "the number counts all steps of the run, also those of earlier loops. Ask for more steps" in caplog.text
