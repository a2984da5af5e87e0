"""Frameworks under ``shardwell launch``: each trainer has its own batches, and a killed one changes no bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardwell

pytestmark = pytest.mark.long

HUGGING_FACE = """
import hashlib, os, pathlib, signal, sys
import transformers
import shardwell
from shardwell.integrations.transformers import Trainer, TrainingArguments
from tests.support.hugging_face import Tokens, tiny_llama

transformers.utils.logging.set_verbosity_error()
folder, victim = pathlib.Path(sys.argv[1]), sys.argv[2]
session = shardwell.join()

class Kill(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 5 and session.trainer == victim and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), getattr(signal, sys.argv[3]))

    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, "of", session.trainer, flush=True)

model = tiny_llama()
shardwell.auto_wrap(model, session)
arguments = TrainingArguments(
    str(folder / "out"), max_steps=int(sys.argv[4]), per_device_train_batch_size=2, learning_rate=0.01,
    logging_steps=1, save_steps=6, report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
)
trainer = Trainer(model, arguments, train_dataset=Tokens(30), callbacks=[Kill()])
trainer.train()
digest = hashlib.sha256()
for value in shardwell.full_state_dict(model).values():
    digest.update(value.numpy().tobytes())
print("weights", digest.hexdigest(), flush=True)
"""

LIGHTNING = """
import hashlib, os, pathlib, signal, sys, warnings
import lightning.pytorch as pl
import torch
from torch import nn
import shardwell
from shardwell.integrations import single_process
from shardwell.integrations.lightning import ShardwellStrategy

folder, victim = pathlib.Path(sys.argv[1]), sys.argv[2]
session = shardwell.join()

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        shardwell.auto_wrap(self.model, session)

    def training_step(self, batch, index):
        if self.global_step == 5 and session.trainer == victim and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        return nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self):
        return shardwell.optim.AdamW(self.parameters(), lr=0.05)

samples = [torch.randn(4, generator=torch.Generator().manual_seed(index)) for index in range(24)]
module = Module()
with single_process():
    trainer = pl.Trainer(
        strategy=ShardwellStrategy(session), accelerator="cpu", devices=1, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True))
digest = hashlib.sha256()
for value in shardwell.full_state_dict(module).values():
    digest.update(value.numpy().tobytes())
print("weights", digest.hexdigest(), flush=True)
"""


def prepare(folder: Path, source: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """Writes a script; returns its command line and environment."""
    folder.mkdir()
    (folder / "train.py").write_text(source)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [str(folder / "train.py"), str(folder), *map(str, arguments)], {**os.environ, "PYTHONPATH": path}


_DIGEST = r"weights ([0-9a-f]{64})"


def digests(output: str) -> set[str]:
    """Returns the digests of the weights that trainers have printed."""
    return set(re.findall(_DIGEST, output))


def launched(folder: Path, source: str, victim: str, *options: str, steps: int = 12) -> tuple[set[str], str]:
    """Returns the digests of the weights that the trainers have printed, and the output."""
    script, environment = prepare(folder, source, victim, "SIGKILL", steps)
    command = [sys.executable, "-m", "shardwell", "launch", "--num-shards", "1", *options, *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    output = done.stdout + done.stderr
    assert (folder / "killed").exists() == (victim != "none"), output
    return digests(output), output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", [HUGGING_FACE, LIGHTNING], ids=["transformers", "lightning"])
def test_killed_trainer_changes_no_bit(source: str, tmp_path: Path) -> None:
    alone, output = launched(tmp_path / "alone", source, "none", "--num-trainers", "1", "--dp", "2")
    assert len(alone) == 1, output
    replaced, output = launched(tmp_path / "replaced", source, "trainer-0", "--num-trainers", "2")
    assert replaced == alone, output
    if source is HUGGING_FACE:  # the other trainer prints and saves in its place
        assert (tmp_path / "replaced/out/checkpoint-12/model.safetensors").exists()
        assert "'epoch': '1.5'" in output, output
    restarted, output = launched(tmp_path / "restarted", source, "trainer-1", "--num-trainers", "2", "--restart", "1")
    assert restarted == alone, output
    assert len(re.findall(_DIGEST, output)) == 2, output


@pytest.mark.timeout(600)
def test_trainer_that_was_stopped_goes_on_at_the_step_of_the_run(tmp_path: Path) -> None:
    """Its place was given to the other trainer meanwhile, which is several steps ahead."""
    alone, output = launched(tmp_path / "alone", HUGGING_FACE, "none", "--num-trainers", "1", "--dp", "2", steps=40)
    script, environment = prepare(tmp_path / "stopped", HUGGING_FACE, "a", "SIGSTOP", 40)
    with shardwell.LocalCluster(num_shards=1, lease_s=1.0) as cluster:
        environment |= {"SHARDWELL_ADDRESS": cluster.address, "SHARDWELL_DP": "2", "SHARDWELL_RUN": "r"}
        stopped, other = (
            subprocess.Popen(
                [sys.executable, *script],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment | {"SHARDWELL_TRAINER": name},
            )
            for name in "ab"
        )
        assert other.stdout is not None
        for line in other.stdout:
            output += line
            if line.startswith("step 10 "):
                break
        stopped.send_signal(signal.SIGCONT)
        rest, of_stopped = other.communicate()[0], stopped.communicate()[0]
    assert digests(output + rest) == digests(of_stopped) == alone, (output, rest, of_stopped)
    assert "it continues at that of the run" in of_stopped, of_stopped
