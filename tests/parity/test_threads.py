"""Two threads: a sharded model works in any thread, one at a time. Another thread gets an error and changes nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell_wire.errors import UsageError
from tests.support.cluster import join_options
from tests.support.module_parity import Pair, gpt, gpt_loss, inputs, layers, squared_loss, wrap_blocks, wrap_children

LIMIT_S = 60

pytestmark = pytest.mark.usefixtures("one_thread")


class Worker(threading.Thread):
    """Runs a function in another thread; ``result`` waits for it."""

    def __init__(self, work: Callable[[], Any], name: str = "evaluator") -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._result, self._error = work, None, list[BaseException]()
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error.append(error)

    def result(self) -> Any:
        self.join(LIMIT_S)
        assert not self.is_alive()
        if self._error:
            raise self._error[0]
        return self._result


class Paused:
    """Stops a thread inside a use of a model, until ``go_on``."""

    def __init__(self) -> None:
        self.reached, self._continue = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._continue.wait(LIMIT_S)

    def go_on(self) -> None:
        self._continue.set()


@contextmanager
def stopped(work: Callable[[], Any], pause: Paused) -> Iterator[Worker]:
    """Context in which another thread, ``trainer``, has stopped inside of a use. It goes on at the end."""
    worker = Worker(work, name="trainer")
    assert pause.reached.wait(LIMIT_S)
    try:
        yield worker
    finally:
        pause.go_on()
    worker.result()


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return gpt_loss(model, 7)


def stop_in_forward(model: Any, pause: Paused) -> Callable[[], Any]:
    model.blocks[1].up.register_forward_hook(pause)
    return lambda: gpt_loss(model, 0)


def stop_in_evaluation(model: Any, pause: Paused) -> Callable[[], Any]:
    model.blocks[1].up.register_forward_hook(pause)
    return lambda: evaluate(model)


def stop_in_backward(model: Any, pause: Paused) -> Callable[[], Any]:
    model.blocks[1].up.register_forward_hook(lambda *arguments: arguments[-1].register_hook(pause) and None)
    return lambda: gpt_loss(model, 0).backward()


def stop_after_forward(model: Any, pause: Paused) -> Callable[[], Any]:
    """The root unit is gathered, and the loss function may read its weights."""

    def train() -> None:
        loss = gpt_loss(model, 0)
        pause()
        loss.backward()

    return train


def stop_after_unshard(model: Any, pause: Paused) -> Callable[[], Any]:
    def read() -> None:
        model.blocks[0].unshard()
        pause()
        model.blocks[0].reshard()

    return read


STOPS = [stop_in_forward, stop_in_evaluation, stop_in_backward, stop_after_forward, stop_after_unshard]
USES: dict[str, Callable[[Pair], Any]] = {
    "forward": lambda pair: gpt_loss(pair.sharded.model, 3),
    "evaluation": lambda pair: evaluate(pair.sharded.model),
    "block": lambda pair: pair.sharded.model.blocks[2](inputs(0, 2, 7, 20)),
    "unshard": lambda pair: pair.sharded.model.blocks[2].unshard(),
    "reshard": lambda pair: pair.sharded.model.reshard(),
    "zero_grad": lambda pair: pair.sharded.units.zero_grad(),
    "finish_item": lambda pair: pair.sharded.units.finish_item(),
    "invalidate": lambda pair: pair.sharded.units.invalidate(),
    "close": lambda pair: pair.sharded.units.close(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("stop", STOPS)
def test_second_thread_is_refused_and_the_first_goes_on(
    stop: Callable[[Any, Paused], Callable[[], Any]], use: str
) -> None:
    pair, pause = Pair(gpt(), wrap_blocks, prefetch_bytes=0), Paused()
    work = stop(pair.sharded.model, pause)
    torch.manual_seed(0)
    with stopped(work, pause):
        states = [unit.state for unit in pair.sharded.units]
        with pytest.raises(UsageError, match="thread 'MainThread' uses a sharded model while thread 'trainer'"):
            USES[use](pair)
        assert [unit.state for unit in pair.sharded.units] == states
    pair.sharded.units.zero_grad()
    pair.train(gpt_loss)


@pytest.mark.parametrize("stop", [stop_in_forward, stop_in_backward])
def test_state_dict_in_a_second_thread_is_refused_during_a_use(stop: Any) -> None:
    pair, pause = Pair(gpt(), wrap_blocks), Paused()
    with stopped(stop(pair.sharded.model, pause), pause), pytest.raises(UsageError, match="'trainer' is using it"):
        pair.sharded.state()
    pair.sharded.units.zero_grad()
    pair.train(gpt_loss)


def test_state_dict_in_a_second_thread_between_uses_of_a_step_has_the_same_bits() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(3):
        torch.manual_seed(number)
        loss = gpt_loss(pair.sharded.model, number)
        read = Worker(pair.sharded.state).result()
        loss.backward()
        torch.manual_seed(number)
        gpt_loss(pair.plain, number).backward()
        for name, value in pair.plain.state_dict().items():
            assert torch.equal(read[name], value)
        pair.step()
    pair.compare()


def test_use_waits_for_a_read_of_another_thread() -> None:
    pair, pause = Pair(gpt(), wrap_blocks), Paused()

    def before_gather(unit_index: int) -> None:
        if threading.current_thread() is not threading.main_thread() and not pause.reached.is_set():
            pause()

    pair.sharded.store.before_gather = before_gather
    reader = Worker(next(iter(pair.sharded.units)).gather_copy, name="reader")
    assert pause.reached.wait(LIMIT_S)
    trainer = Worker(lambda: gpt_loss(pair.sharded.model, 0).backward(), name="trainer")
    pause.go_on()
    trainer.result()
    reader.result()
    pair.sharded.units.zero_grad()
    pair.train(gpt_loss)


def test_each_step_may_run_in_another_thread() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(4):

        def step(number: int = number) -> None:
            pair.backward(gpt_loss, number)
            pair.step()

        if number % 2:
            step()
        else:
            Worker(step).result()
        Worker(lambda: evaluate(pair.sharded.model)).result()
    pair.compare()


def test_alive_threads_take_turns_between_steps() -> None:
    """Evaluation of one thread, and training of another one, under a lock of the user."""
    pair, lock, done = Pair(gpt(), wrap_blocks), threading.Lock(), threading.Event()

    def evaluate_often() -> int:
        count = 0
        while not done.is_set() or count == 0:
            with lock:
                evaluate(pair.sharded.model)
            count += 1
        return count

    evaluator = Worker(evaluate_often)
    for number in range(6):
        with lock:
            pair.backward(gpt_loss, number)
            pair.step()
    done.set()
    assert evaluator.result() > 0
    pair.compare()


@pytest.mark.parametrize("recompute", [None, False, True])
def test_backward_may_run_in_another_thread(recompute: bool | None) -> None:
    pair = Pair(gpt(recompute), wrap_blocks)
    for number in range(3):
        for model in (pair.plain, pair.sharded.model):
            torch.manual_seed(number)
            loss = gpt_loss(model, number)
            Worker(loss.backward).result()
        pair.step()
    pair.compare()


@pytest.mark.parametrize("stop", [stop_in_forward, stop_in_backward])
def test_backward_in_another_thread_during_a_use_is_refused(stop: Any) -> None:
    pair, pause = Pair(gpt(), wrap_blocks), Paused()
    losses: list[torch.Tensor] = []

    def work() -> None:
        losses.append(gpt_loss(pair.sharded.model, 0))
        stop(pair.sharded.model, pause)()

    with stopped(work, pause), pytest.raises(UsageError, match=r"'MainThread' uses .* while thread 'trainer'"):
        losses[0].backward()
    pair.sharded.units.zero_grad()
    pair.sharded.model.blocks[1].up._forward_hooks.clear()
    pair.train(gpt_loss)


def test_plain_models_train_in_other_threads_meanwhile() -> None:
    pair, pause = Pair(gpt(), wrap_blocks), Paused()
    plain, alone = layers(7, 5, 3), layers(7, 5, 3)
    with stopped(stop_in_forward(pair.sharded.model, pause), pause):
        squared_loss(plain, 0).backward()
    squared_loss(alone, 0).backward()
    for one, other in zip(plain.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_thread_that_ended_in_the_middle_of_a_step_does_not_keep_the_model() -> None:
    pair = Pair(gpt(), wrap_blocks)
    Worker(lambda: gpt_loss(pair.sharded.model, 0)).result()
    Worker(pair.sharded.model.blocks[0].unshard).result()
    pair.train(gpt_loss)


def test_error_in_a_use_ends_it() -> None:
    pair = Pair(layers(7, 5, 3), wrap_children)

    def fail() -> None:
        with torch.no_grad():
            pair.sharded.model(inputs(0, 2, 8))

    keep_alive = Paused()

    def fail_and_stay() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fail()
        keep_alive()

    with stopped(fail_and_stay, keep_alive):
        pair.train(squared_loss)


def test_two_sessions_train_in_two_threads() -> None:
    pairs = [Pair(layers(7, 5, 3), wrap_children) for _ in range(2)]
    workers = [Worker(lambda pair=pair: pair.train(squared_loss, 20)) for pair in pairs]  # type: ignore[misc]
    for worker in workers:
        worker.result()


def join(cluster: shardwell.LocalCluster, run: str, transports: str) -> shardwell.Session:
    return shardwell.join(
        cluster.address, run=run, **join_options(transports=transports, keep_bytes=0, prefetch_bytes=0)
    )


@pytest.mark.parametrize("transports", ["shm", "socket"])
def test_thread_that_evaluates_on_servers_gets_an_error_or_changes_no_bit(
    cluster: shardwell.LocalCluster, run_name: str, transports: str
) -> None:
    model = layers(16, 16, 16, 16)
    plain = copy.deepcopy(model)
    done = threading.Event()
    with join(cluster, run_name, transports) as session:
        shardwell.auto_wrap(model, session)
        optimizer: Any = shardwell.optim.AdamW(model.parameters(), lr=1e-2)
        refused: list[str] = []

        def evaluate_often() -> None:
            while not done.is_set():
                try:
                    with torch.no_grad():
                        model(torch.ones(4, 16))
                    shardwell.full_state_dict(model)
                except UsageError as error:
                    refused.append(str(error))

        evaluator = Worker(evaluate_often)
        step = 0
        while step < 40:
            try:
                model(torch.full((4, 16), 0.01 * step)).pow(2).mean().backward()
                optimizer.step()
            except UsageError as error:  # the other thread was first: drop what this one has done of the step
                refused.append(str(error))
                drop(optimizer)
                continue
            step += 1
        done.set()
        evaluator.result()
        assert refused
        assert not [text for text in refused if not ("'evaluator'" in text and "'MainThread'" in text)]
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        for step in range(40):
            plain(torch.full((4, 16), 0.01 * step)).pow(2).mean().backward()
            reference.step()
            reference.zero_grad()
        full = shardwell.full_state_dict(model)
        for name, value in plain.named_parameters():
            assert torch.equal(full[name], value)


def drop(optimizer: Any) -> None:
    """Calls ``zero_grad``, again while another thread is using the model."""
    while True:
        try:
            optimizer.zero_grad()
            return
        except UsageError:
            continue


def test_advice_of_the_error_to_use_a_reader_works(cluster: shardwell.LocalCluster, run_name: str) -> None:
    model, plain_model, done = layers(16, 16, 16), layers(16, 16, 16), threading.Event()
    with join(cluster, run_name, "socket") as session:
        shardwell.auto_wrap(model, session)
        optimizer: Any = shardwell.optim.SGD(model.parameters(), lr=0.1)

        def serve() -> int:
            count = 0
            while not done.is_set() or count == 0:
                with shardwell.attach(cluster.address, run=run_name) as reader:
                    reader.wait_for(1, timeout_s=LIMIT_S)
                    reader.follow(plain_model)
                plain_model(torch.ones(4, 16))
                count += 1
            return count

        server = Worker(serve)
        for _ in range(10):
            model(torch.ones(4, 16)).pow(2).mean().backward()
            optimizer.step()
        done.set()
        assert server.result() > 0
