"""Random requests to every rpc: the servers reject them with a precise status, and stay alive."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.cluster import FuzzedCluster, fuzzed_cluster, record, train
from tests.fuzz.handlers import Handler
from tests.fuzz.messages import Mutator

CALLS_PER_EXAMPLE = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedCluster]:
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patched, fuzzed_cluster(folder / "cluster") as running:
        patched.chdir(folder)  # a request may name a checkpoint folder
        record(running, folder / "checkpoints")
        yield running


def test_recorded_training_uses_most_rpcs(cluster: FuzzedCluster) -> None:
    recorded = {handler.path for handler in cluster.handlers.all if handler.recorded}
    every = {handler.path for handler in cluster.handlers.all}
    assert len(recorded) >= 30, sorted(every - recorded)


def test_strangers_and_holders_of_other_runs_tokens_change_nothing(cluster: FuzzedCluster) -> None:
    """The hash of a run that trains during the attack is that of a run without one."""
    undisturbed = train(cluster, "undisturbed")
    findings = cluster.attack_while(lambda: train(cluster, "victim", pause_s=0.02), tokens=cluster.tokens())
    assert findings.result == undisturbed
    assert findings.bad == {}
    assert findings.statuses["UNAUTHENTICATED"] > 100
    assert findings.statuses["PERMISSION_DENIED"] > 100


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(rng=st.randoms(use_true_random=False, note_method_calls=False), data=st.data())
def test_every_rpc_survives_requests_of_admitted_callers(
    cluster: FuzzedCluster, rng: random.Random, data: st.DataObject
) -> None:
    handler: Handler = data.draw(st.sampled_from(cluster.handlers.all))
    messages = handler.mutated(Mutator(rng, cluster.values), rng)
    findings = cluster.call(handler, messages, None)
    assert findings.bad == {}
