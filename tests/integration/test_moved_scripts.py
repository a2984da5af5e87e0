"""Scripts as their users have them, moved as docs/loop.md and docs/frameworks.md say, in few lines, to equal losses.

Each script leaves its numbers in ``losses``. A line counts as changed if a diff adds or replaces it; comments and empty
lines do not count.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pytest

import shardwell.testing

CLASSIFIER = """
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return torch.log_softmax(self.fc(x.flatten(1)), dim=1)

def test(model, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            correct += (model(data).argmax(1) == target).sum().item()
    model.train()
    losses.append(correct / len(loader.dataset))

torch.manual_seed(0)
images = TensorDataset(torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,)))
train_loader, test_loader = DataLoader(images, batch_size=8), DataLoader(images, batch_size=32)
model, losses = Net(), []
"""

MNIST = (
    CLASSIFIER
    + """
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(3):
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(data), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    test(model, test_loader)
    scheduler.step()
""",
    CLASSIFIER
    + """
import shardwell
session = shardwell.join()
shardwell.auto_wrap(model, session)
optimizer = shardwell.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
session.track(scheduler=scheduler)
for step in session.steps(train_loader, epochs=3):
    for data, target in step.batches(train_loader):
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(data), target)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    if not step.ends_epoch:
        continue
    test(model, test_loader)
    scheduler.step()
""",
)

TIMM = (
    CLASSIFIER
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
for epoch in range(2):
    for data, target in train_loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.nll_loss(model(data), target)
        scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
        ema.update_parameters(model)
        scheduler.step()
averaged = dict(ema.module.named_parameters())
""",
    CLASSIFIER
    + """
import shardwell
session = shardwell.join()
shardwell.auto_wrap(model, session)
optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
optimizer.ema_decay = 0.9
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
scaler = shardwell.amp.GradScaler("cpu", init_scale=1024.0)
session.track(scheduler=scheduler, scaler=scaler)
for step in session.steps(train_loader, epochs=2):
    for data, target in step.batches(train_loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.nll_loss(model(data), target)
        scaler.scale(loss).backward()
        losses.append(loss.item())
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
averaged = shardwell.full_state_dict(model, ema=True)
""",
)

LANGUAGE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator, get_scheduler

torch.manual_seed(0)
samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 32, (16, 8))]
loader, losses = DataLoader(samples, batch_size=4, collate_fn=default_data_collator), []
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(config)
"""

ACCELERATE = (
    LANGUAGE
    + """
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        loss = model(**batch).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
""",
    LANGUAGE
    + """
import shardwell.integrations
session = shardwell.join()
with shardwell.integrations.single_process():
    accelerator = Accelerator(cpu=True)
shardwell.auto_wrap(model, session)
optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
for step in session.steps(loader, epochs=2):
    for batch in step.batches(loader):
        loss = model(**batch).loss
        losses.append(loss.item())
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
""",
)

GRAPH = """
import torch
from torch import nn

class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x, adjacency):
        hidden = torch.relu(adjacency @ self.first(x))
        return adjacency @ self.second(nn.functional.dropout(hidden, 0.5, self.training))

torch.manual_seed(0)
x, y, edges = torch.randn(20, 8), torch.randint(0, 3, (20,)), (torch.rand(20, 20) < 0.2).float()
adjacency = (edges + torch.eye(20)) / (edges.sum(1, keepdim=True) + 1)
train_mask = torch.rand(20) < 0.5
model, losses = GCN(), []
"""
GRAPH_LOOP = """
torch.manual_seed(1)
for epoch in range(5):
    model.train()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, adjacency)[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x, adjacency).argmax(1) == y)[~train_mask].float().mean()
    losses += [loss.item(), accuracy.item()]
"""
GNN = (
    f"{GRAPH}\noptimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4, fused=True)\n{GRAPH_LOOP}",
    f"""{GRAPH}
import shardwell
session = shardwell.join()
shardwell.auto_wrap(model, session)
optimizer = shardwell.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
{GRAPH_LOOP}""",
)

POLICY = """
import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
policy, losses = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), []

class Environment:
    def reset(self):
        self.state, self.time = torch.zeros(4), 0
        return self.state

    def step(self, action):
        self.time += 1
        self.state = 0.9 * self.state + torch.tensor([1.0, -1.0, 0.5, 0.1]) * (action - 0.4)
        return self.state, float(-self.state.abs().sum()), self.time == 5
"""
EPISODES = """
environment = Environment()
torch.manual_seed(1)
for episode in range(4):
    state, done, log_probs, rewards = environment.reset(), False, [], []
    while not done:
        chosen = Categorical(logits=policy(state))
        action = chosen.sample()
        state, reward, done = environment.step(action.item())
        log_probs.append(chosen.log_prob(action))
        rewards.append(reward)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    loss = -(torch.stack(log_probs) * (returns - returns.mean())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
REINFORCE = (
    f"{POLICY}\noptimizer = torch.optim.Adam(policy.parameters(), lr=0.01, fused=True)\n{EPISODES}",
    f"""{POLICY}
import shardwell
session = shardwell.join()
shardwell.auto_wrap(policy, session)
optimizer = shardwell.optim.Adam(policy.parameters(), lr=0.01)
{EPISODES}""",
)

SCRIPTS = {
    "MNIST with a scheduler": (*MNIST, 10),
    "averages, autocast, scaler and scheduler": (*TIMM, 13),
    "Accelerate": (*ACCELERATE, 10),
    "graph network on the whole graph": (*GNN, 4),
    "REINFORCE": (*REINFORCE, 4),
}
"""The script, the moved script, and the number of changed lines."""


def changed_lines(before: str, after: str) -> list[str]:
    """Returns the lines that a diff adds, without comments and empty lines."""
    found = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    added = (line[1:].partition("#")[0].strip() for line in found if line[:1] == "+" and line[:3] != "+++")
    return [line for line in added if line]


@pytest.fixture(autouse=True)
def _cluster() -> Iterator[None]:
    with shardwell.testing.in_process_cluster(num_shards=2):
        yield


@pytest.mark.filterwarnings("ignore:a sharded module runs under torch.autocast")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_moved_in_few_lines_to_equal_losses(name: str) -> None:
    before, after, num_changed = SCRIPTS[name]
    plain: dict[str, Any] = {"__name__": "__main__"}
    exec(before, plain)
    moved: dict[str, Any] = {"__name__": "__main__"}
    exec(after, moved)
    try:
        assert moved["losses"] == plain["losses"]
        assert len(changed_lines(before, after)) == num_changed, changed_lines(before, after)
        for parameter, average in plain.get("averaged", {}).items():
            assert (moved["averaged"][parameter] - average).abs().max() < 1e-6
    finally:
        moved["session"].close()


def test_changed_lines_are_counted() -> None:
    assert changed_lines("a\nb\nc", "a\n    b\n# why\n\nc\nd") == ["b", "d"]
