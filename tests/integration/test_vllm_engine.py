"""vLLM follows a run: greedy answers in float32 equal those of Transformers with exactly the stated version's weights.

Run by ``make test-engines``. vLLM's own checksums do not see the weights that its kernels for CPUs have repacked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import Request

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwell
from shardwell.engines.vllm_server import VllmServer
from shardwell.find_credentials import find_credentials
from shardwell.transport.service_client import CoordinatorClient
from shardwell.weights.pinned_version import PinnedVersion, UnitReader
from shardwell_wire.errors import CorruptDataError, UnavailableError, UsageError, VersionGoneError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import wait_in_sync, wait_until
from tests.support.processes import ROOT, fork_context

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

PROMPTS = [[1, 5, 9, 200, 33, 7], [4, 4, 100], [300, 2, 17, 60]]
NUM_TOKENS = 8
KEPT = 100
"""Versions that a transfer has time for, also while the servers replace one that was killed."""
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    head_dim=32,
    tie_word_embeddings=False,
)


def llama(seed: int) -> LlamaForCausalLM:
    """Returns a model whose answers depend on every layer."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(CONFIG).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


class Training(threading.Thread):
    """Trains a model, and keeps the weights of every version."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.run_name, self.states = uuid.uuid4().hex, dict[int, dict[str, torch.Tensor]]()
        self._address, self.stop = address, threading.Event()

    def run(self) -> None:
        model = llama(0)
        with shardwell.join(self._address, run=self.run_name, keep_versions=KEPT, backups=1) as session:
            shardwell.auto_wrap(model, session)
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
            for step in session.steps(10**6):
                self.states[step.number] = shardwell.full_state_dict(model)
                for tokens in step.batches(lambda step, rank: torch.randint(0, 512, (2, 16))):
                    model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if self.stop.wait(0.1):
                    return


@pytest.fixture(scope="module")
def training() -> Iterator[tuple[shardwell.LocalCluster, Training]]:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        training = Training(cluster.address)
        training.start()
        try:
            wait_until(lambda: len(training.states) > 2, "the first steps", timeout_s=60)
            wait_in_sync(cluster.address, training.run_name)
            yield cluster, training
        finally:
            training.stop.set()
            training.join()


@pytest.fixture(scope="module")
def llm(training: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM

    cluster, run = training
    folder = tmp_path_factory.mktemp("llama")
    llama(1).save_pretrained(folder)
    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        weight_transfer_config={"backend": "shardwell"},
    )
    attach(engine, cluster, run)
    yield engine
    engine.shutdown_weight_transfer_engine()


def attach(llm: Any, cluster: shardwell.LocalCluster, training: Training, **options: Any) -> None:
    init_info = {"address": cluster.address, "run": training.run_name, "token_file": cluster.token_file, **options}
    llm.init_weight_transfer_engine({"init_info": init_info})


def answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    [version] = {span.version for each in found for span in each.outputs[0].weight_versions}
    assert version == llm.get_weight_version()
    return [list(each.outputs[0].token_ids) for each in found]


@torch.no_grad()
def expected(training: Training, version: int) -> list[list[int]]:
    """Returns the answers of Transformers."""
    wait_until(lambda: version in training.states, "the state")
    model = llama(0)
    model.load_state_dict(training.states[version])
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def load(llm: Any, training: Training, reader: shardwell.Reader) -> int:
    """Loads the newest version, and asserts that answers are those of its weights."""
    from shardwell.engines.vllm import update

    update(llm, version := reader.version)
    assert llm.get_weight_version() == str(version)
    assert answers(llm) == expected(training, version)
    return version


def test_answers_are_those_of_the_stated_version(training: Any, llm: Any) -> None:
    cluster, run = training
    seen = set()
    with shardwell.attach(cluster.address, run.run_name) as reader:
        for _ in range(20):
            seen.add(load(llm, run, reader))
            reader.wait_for(max(seen) + 1, 60.0)
    assert len(seen) == 20


def test_code_of_the_page_runs(training: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(
        r'```python title="update_vllm.py"\n(.*?)^```', (ROOT / "docs/serving.md").read_text(), re.S | re.M
    )
    cluster, run = training
    names = {"address": cluster.address, "token_file": cluster.token_file, "shardwell": shardwell, "llm": llm}
    names["prompts"] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    exec(code.replace('"gpt"', repr(run.run_name)), names)
    assert [span.version for span in names["answer"].weight_versions] == [llm.get_weight_version()]


def fails_at(monkeypatch: pytest.MonkeyPatch, unit: int, action: Any) -> None:
    """Calls ``action`` before the unit of this number is read."""
    reads, count = UnitReader.read, iter(range(10**6))

    def read(self: UnitReader, placed: Any, ranges: Any) -> Callable[[], torch.Tensor]:
        if next(count) == unit:
            action()
        return reads(self, placed, ranges)

    monkeypatch.setattr(UnitReader, "read", read)


def corrupt() -> None:
    raise CorruptDataError("planted")


def test_failed_update_leaves_the_former_version(training: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell.engines.vllm import update

    cluster, run = training
    with shardwell.attach(cluster.address, run.run_name) as reader:
        for unit in range(4):
            version = load(llm, run, reader)
            before = answers(llm)
            reader.wait_for(version + 1, 60.0)
            with monkeypatch.context() as patch:
                fails_at(patch, unit % 3, corrupt)
                with pytest.raises(CorruptDataError, match="planted"):
                    update(llm, reader.version)
            assert llm.get_weight_version() == str(version) and answers(llm) == before
        reader.wait_for(KEPT + 1, 60.0)
        with pytest.raises(VersionGoneError, match="is no longer available"):
            update(llm, 0)
        assert llm.get_weight_version() == str(version) and answers(llm) == before
        load(llm, run, reader)


def test_shard_server_is_killed_during_a_transfer(training: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell.engines.vllm import update

    cluster, run = training
    with shardwell.attach(cluster.address, run.run_name) as reader:
        for number in range(2):
            wait_in_sync(cluster.address, run.run_name)
            version = load(llm, run, reader)
            before = answers(llm)
            with monkeypatch.context() as patch:
                fails_at(patch, 1, partial(os.kill, cluster.shards[number].pid, signal.SIGKILL))
                try:
                    update(llm, newest := reader.version)
                    assert answers(llm) == expected(run, newest)
                except VersionGoneError:  # a server that was started again has versions from then on
                    assert llm.get_weight_version() == str(version) and answers(llm) == before
            load(llm, run, reader)


def test_wrong_arguments_are_named(training: Any, llm: Any) -> None:
    cluster, run = training
    with pytest.raises(TypeError, match="unexpected keyword argument 'adress'"):
        llm.init_weight_transfer_engine({"init_info": {"adress": cluster.address}})
    llm.start_weight_update()
    with pytest.raises(TypeError, match="unexpected keyword argument 'name'"):
        llm.update_weights({"update_info": {"version": 1, "name": "eval"}})
    with shardwell.attach(cluster.address, run.run_name) as reader:
        load(llm, run, reader)


def test_version_is_read_while_the_engine_serves(training: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, run = training
    reading, go_on = threading.Event(), threading.Event()
    with shardwell.attach(cluster.address, run.run_name) as reader, monkeypatch.context() as patch:
        version = load(llm, run, reader)
        before = answers(llm)
        newest = reader.wait_for(version + 1, 60.0)
        checks: list[threading.Thread] = []
        patch.setattr(
            "shardwell.engines.vllm.refuse_other_model", lambda *_, config: checks.append(threading.current_thread())
        )
        attach(llm, cluster, run)  # the run's model is checked again
        fails_at(patch, 0, lambda: (reading.set(), go_on.wait(60)))
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": newest, "until": "started"}})
        assert reading.wait(60) and answers(llm) == before
        go_on.set()
        llm.update_weights({"update_info": {"version": newest, "until": "read"}})
        assert answers(llm) == before and checks == [threading.current_thread()]
        llm.update_weights({"update_info": {"version": newest}})
        llm.finish_weight_update(str(newest))
        llm.reset_prefix_cache()
        assert answers(llm) == expected(run, newest)


def test_run_of_another_model_is_refused(training: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell.engines.vllm import update

    cluster, run = training
    with shardwell.attach(cluster.address, run.run_name) as reader:
        version = load(llm, run, reader)
        before = answers(llm)
        attach(llm, cluster, run)
        with monkeypatch.context() as patch:
            patch.setattr(PinnedVersion, "values", lambda _: {"head.weight": torch.zeros(2)}.items())
            with pytest.raises(UsageError, match=r"has no 'head.weight' .* lacks 'model.embed_tokens.weight'"):
                update(llm, version)
        assert llm.get_weight_version() == str(version) and answers(llm) == before
        load(llm, run, reader)


def test_load_that_fails_halfway_is_repeated(training: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM as Served

    from shardwell.engines.vllm import update

    cluster, run = training
    loads = Served.load_weights

    def fail(self: Any, pairs: Iterator[tuple[str, torch.Tensor]]) -> Any:
        loads(self, (pair for pair in pairs if "q_proj" in pair[0]))  # a part of a tensor that vLLM joins
        corrupt()

    with shardwell.attach(cluster.address, run.run_name) as reader:
        version = load(llm, run, reader)
        reader.wait_for(version + 1, 60.0)
        with monkeypatch.context() as patch, pytest.raises(CorruptDataError, match="planted"):
            patch.setattr(Served, "load_weights", fail)
            update(llm, reader.version)
        assert llm.get_weight_version() == str(version)
        load(llm, run, reader)


URL = "http://127.0.0.1:18431"


def served() -> tuple[int, list[list[int]]]:
    """Returns answers of the server, and the version that served from the first to the last of them."""
    server = VllmServer(URL, {})
    while True:
        before, found = server.version(), []
        for prompt in PROMPTS:
            request = {"prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            answer = server._call("v1/completions", {**request, "return_token_ids": True})
            found.append(answer["choices"][0]["token_ids"])
        if server.version() == before:
            return before, found


def served_version() -> int:
    with suppress(UnavailableError):
        return VllmServer(URL, {}).version()
    return -2


@pytest.fixture
def start(training: Any, tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """Starts a vLLM server with a number of workers at the same address. It receives weights over sockets."""
    llama(1).save_pretrained(tmp_path / "model")
    patch = "from shardwell.weights import pinned_version\npinned_version.TRANSPORT_NAMES = ('socket',)\n"
    (tmp_path / "sitecustomize.py").write_text(patch)
    options = ["--skip-tokenizer-init", "--dtype=float32", "--enforce-eager", "--max-model-len=128", "--max-num-seqs=4"]
    backend = '--weight-transfer-config={"backend": "shardwell"}'
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={tmp_path / 'model'}", *options]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    started: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "log").open("wb") as log:

        def start(num_workers: int = 1) -> subprocess.Popen[bytes]:
            every = [*command, backend, "--port=18431", f"--tensor-parallel-size={num_workers}"]
            started.append(subprocess.Popen(every, env=environment, stdout=log, stderr=log, start_new_session=True))
            return started[-1]

        try:
            yield start
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            print((tmp_path / "log").read_text()[-8000:])


@pytest.mark.timeout(1800)  # two starts of vLLM, which take minutes on a busy machine
def test_killed_server_joins_again_in_one_update(training: Any, start: Any) -> None:
    cluster, run = training
    process = start()
    follow = ["-m", "shardwell.engines.vllm_server", "--run", run.run_name, "--address", cluster.address, URL]
    follower = subprocess.Popen([sys.executable, *follow, "--token-file", cluster.token_file])
    try:
        wait_until(lambda: served_version() > 0, "the first update", timeout_s=900)
        for _ in range(4):
            newest, found = served()
            assert found == expected(run, newest)
            wait_until(lambda: served_version() > newest, "the next update", timeout_s=60)  # noqa: B023 (called at once)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        start()
        wait_until(lambda: served_version() > newest, "an update of the server that was started again", timeout_s=900)
        newest, found = served()
        assert found == expected(run, newest)
    finally:
        follower.terminate()
        follower.wait()


CALLS = ["init_weight_transfer_engine", "start_weight_update", "started", "pause", "read", "loaded"]
CALLS += ["finish_weight_update", "resume"]


def follow_until_killed(call: str, is_answered: bool, arguments: list[str]) -> None:
    """Runs the command, which is killed when it has sent a call, or has its answer."""
    from shardwell import engines

    opens = engines.urlopen

    def open_or_die(request: Request, timeout: float) -> Any:
        body = json.loads(request.data or b"{}").get("update_info", {}) if isinstance(request.data, bytes) else {}
        if body.get("until", request.full_url.rpartition("/")[2].partition("?")[0]) != call:
            return opens(request, timeout=timeout)
        if is_answered:
            opens(request, timeout=timeout).read()
        else:
            connection = HTTPConnection(request.host)
            connection.request("POST", request.selector, request.data, dict(request.header_items()))
        return os.kill(os.getpid(), signal.SIGKILL)

    engines.urlopen = open_or_die  # type: ignore[assignment]
    sys.argv = ["vllm_server", *arguments]
    engines.run_command(VllmServer, None)


def listed(address: str, token_file: str, run: str) -> list[coordinator_pb2.ReaderSummary]:
    coordinator = CoordinatorClient(address, find_credentials(address, token_file, None))
    with closing(coordinator):
        answer = coordinator.call("ListReaders", coordinator_pb2.ListReadersRequest(run=run), timeout_s=60)
    return [each for each in answer.readers if each.name == "engine"]


def test_engine_is_listed_and_can_hold_the_run(training: Any, llm: Any) -> None:
    cluster, run = training
    with shardwell.attach(cluster.address, run.run_name) as reader:
        attach(llm, cluster, run, name="engine", hold_s=9.0)
        version = load(llm, run, reader)
        [engine] = listed(cluster.address, cluster.token_file, run.run_name)
        assert (engine.version, engine.hold_s) == (version, 9.0)
        attach(llm, cluster, run)
        load(llm, run, reader)
        assert not listed(cluster.address, cluster.token_file, run.run_name)


@pytest.mark.timeout(1800)  # 17 updates
def test_workers_read_once_and_survive_callers_that_are_killed(training: Any, start: Any) -> None:
    cluster, run = training
    start(2)
    attached = {"address": cluster.address, "run": run.run_name, "token_file": cluster.token_file}
    size = sum(value.nbytes for value in run.states[1].values())

    def update(caller: VllmServer) -> int:
        """Updates the server to the newest version, and asserts that it answers with exactly its weights."""
        with shardwell.attach(cluster.address, run.run_name, token_file=cluster.token_file) as reader:
            newest = reader.version
        caller.update(newest)
        assert served() == (newest, expected(run, newest))
        return newest

    wait_until(lambda: served_version() == -1, "the server", timeout_s=900)
    caller = VllmServer(URL, {**attached, "name": "engine"})
    versions = [update(caller) for _ in range(3)]
    [engine] = listed(cluster.address, cluster.token_file, run.run_name)  # one of two workers has read
    assert engine.version == versions[-1] and 3 * size <= engine.received_bytes < 3.1 * size
    with pytest.raises(UnavailableError, match="update_weights failed"):
        caller.update(0)  # is gone
    assert served() == (versions[-1], expected(run, versions[-1]))
    wait_until(lambda: max(run.states) > versions[-1], "another version")
    update(caller)

    options = ["--address", cluster.address, "--run", run.run_name, "--token-file", cluster.token_file]
    for call in CALLS:
        for is_answered in (False, True):
            arguments = [*options, URL]
            follower = fork_context.Process(target=follow_until_killed, args=(call, is_answered, arguments))
            follower.start()
            follower.join(120)
            assert follower.exitcode == -signal.SIGKILL, (call, is_answered)
            print("killed at", call, is_answered)
            update(VllmServer(URL, attached))
