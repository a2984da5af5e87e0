"""``shardwell.integrations.transformers`` against Hugging Face's Trainer without Shardwell: the same bits."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM

import shardwell
import shardwell.testing
from shardwell.integrations import transformers as sharded
from shardwell_wire.errors import StepRestartedError, UsageError
from tests.support.hugging_face import Tokens, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:a sharded module runs under torch.autocast")

MEASURED = ("runtime", "samples_per_second", "steps_per_second", "tokens_per_second")


class StoppedError(Exception):
    """Ends a Trainer in the midst of a training."""


class Recorder(transformers.TrainerCallback):
    """Records the names of all events. Stops after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.events: list[str] = []
        for name in (
            "step_begin",
            "substep_end",
            "step_end",
            "evaluate",
            "save",
            "epoch_begin",
            "epoch_end",
            "train_end",
        ):
            setattr(self, f"on_{name}", lambda *_, name=name, **__: self.events.append(name))
        self.stop_after = stop_after

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.stop_after:
            raise StoppedError


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = transformers.utils.logging.get_verbosity()
    yield
    transformers.utils.logging.set_verbosity(before)


def arguments(kind: type[Any], folder: Path, **options: Any) -> Any:
    given = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.0,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    return kind(str(folder), **given)


def adapted_llama() -> nn.Module:
    """Returns a model with an adapter of PEFT."""
    model = tiny_llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2))


def plain_trainer(folder: Path, size: int = 22, callbacks: Any = (), **options: Any) -> transformers.Trainer:
    given = arguments(transformers.TrainingArguments, folder, **options)
    return transformers.Trainer(
        tiny_llama(), given, train_dataset=Tokens(size), eval_dataset=Tokens(6), callbacks=list(callbacks)
    )


def sharded_trainer(
    session: shardwell.Session, folder: Path, size: int = 22, callbacks: Any = (), **options: Any
) -> sharded.Trainer:
    model = tiny_llama()
    shardwell.auto_wrap(model, session)
    given = arguments(sharded.TrainingArguments, folder, **options)
    return sharded.Trainer(model, given, train_dataset=Tokens(size), eval_dataset=Tokens(6), callbacks=list(callbacks))


def history(trainer: transformers.Trainer, *left_out: str) -> list[dict[str, Any]]:
    """Returns what the Trainer has logged, without times."""
    ignored = (*MEASURED, *left_out)
    return [{k: v for k, v in row.items() if not k.endswith(ignored)} for row in trainer.state.log_history]


def weights(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    model = trainer.model
    sharded_model = isinstance(trainer, sharded.Trainer)
    return dict(shardwell.full_state_dict(model) if sharded_model else model.state_dict())


def assert_same(found: transformers.Trainer, expected: transformers.Trainer) -> None:
    values = weights(found)
    assert all(torch.equal(value, values[name]) for name, value in weights(expected).items())


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "accumulation": (1, {}, {"include_num_input_tokens_seen": "all"}),
    "bf16": (1, {}, {"bf16": True, "gradient_accumulation_steps": 1, "lr_scheduler_type": "cosine"}),
    "sgd": (1, {}, {"optim": "sgd", "lr_scheduler_type": "constant", "dataloader_drop_last": True}),
    "two ranks": (2, {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 1}),
}
"""Data ranks, options of the plain Trainer only, and options."""


@pytest.mark.parametrize("case", CASES)
def test_trainer_computes_the_bits_of_the_plain_trainer(case: str, tmp_path: Path) -> None:
    dp, plain_options, options = CASES[case]
    size, expected_calls, calls = 24 if dp > 1 else 22, Recorder(), Recorder()
    expected = plain_trainer(tmp_path / "a", size, [expected_calls], **{**options, **plain_options})
    expected.train()
    with shardwell.testing.in_process_cluster(dp=dp), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path / "b", size, [calls], **options)
        trainer.train()
        assert_same(trainer, expected)
        assert history(trainer, "grad_norm", "train_loss") == history(expected, "grad_norm", "train_loss")
        found, predicted = trainer.predict(Tokens(8)), expected.predict(Tokens(8))
        assert (found.predictions == predicted.predictions).all()
        assert found.metrics["test_loss"] == predicted.metrics["test_loss"]
    if dp == 1:
        assert calls.events == expected_calls.events


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapter_has_the_bits_of_the_plain_trainer(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    given = arguments(transformers.TrainingArguments, tmp_path / "a", **options)
    transformers.Trainer(adapted_llama(), given, train_dataset=Tokens(22)).train()
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        model = adapted_llama()
        shardwell.auto_wrap(model, session)
        given = arguments(sharded.TrainingArguments, tmp_path / "b", **options)
        sharded.Trainer(model, given, train_dataset=Tokens(22)).train()
    expected, saved = (load_file(tmp_path / folder / "checkpoint-4/adapter_model.safetensors") for folder in "ab")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(value, saved[name]) for name, value in expected.items())
    settings = [(tmp_path / folder / "checkpoint-4/adapter_config.json").read_text() for folder in "ab"]
    assert settings[0] == settings[1]


def test_label_smoothing_is_that_of_the_plain_trainer(tmp_path: Path) -> None:
    """The Trainer shifts labels for models whose class it knows by name."""
    options = {"max_steps": 2, "label_smoothing_factor": 0.1, "eval_strategy": "no"}
    expected = plain_trainer(tmp_path / "a", **options)
    expected.train()
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path / "b", **options)
        trainer.train()
        assert_same(trainer, expected)


def test_subclass_of_the_trainer_may_be_mixed_in(tmp_path: Path) -> None:
    class MixedTrainer(sharded.Trainer, transformers.Seq2SeqTrainer):
        """A subclass of the Trainer with sharded weights."""

    class MixedArguments(sharded.TrainingArguments, transformers.Seq2SeqTrainingArguments):
        """Its arguments."""

    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        model = tiny_llama()
        shardwell.auto_wrap(model, session)
        given = arguments(MixedArguments, tmp_path, max_steps=2, eval_strategy="no", optim="rmsprop")
        trainer = MixedTrainer(model, given, train_dataset=Tokens(8))
        assert trainer.train().global_step == 2
        assert type(trainer.optimizer.optimizer) is shardwell.optim.RMSprop


def test_clipping_equals_that_of_the_plain_trainer_to_the_rounding_of_the_norm(tmp_path: Path) -> None:
    expected = plain_trainer(tmp_path / "a", max_grad_norm=0.5)
    expected.train()
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path / "b", max_grad_norm=0.5)
        trainer.train()
    for row, expected_row in zip(history(trainer), history(expected), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-5)


def test_run_goes_on_in_another_trainer_and_saves_what_it_saved(tmp_path: Path) -> None:
    """Early stopping, best metric, schedule, events and evaluations are those of a Trainer that was never stopped."""
    options = {"metric_for_best_model": "loss", "save_strategy": "steps", "save_steps": 3}
    stopping = transformers.EarlyStoppingCallback(early_stopping_patience=3, early_stopping_threshold=0.09)
    whole = plain_trainer(tmp_path / "a", callbacks=[stopping], num_train_epochs=5, **options)
    whole.train()
    assert 6 < whole.state.global_step < 30, "the training must stop early"
    with shardwell.testing.in_process_cluster():
        for stop_after in (4, 6, None):
            with shardwell.join() as session:
                calls = [Recorder(stop_after), transformers.EarlyStoppingCallback(3, 0.09)]
                trainer = sharded_trainer(session, tmp_path / "b", callbacks=calls, num_train_epochs=5, **options)
                if stop_after is None:
                    trainer.train()
                    assert_same(trainer, whole)
                else:
                    with pytest.raises(StoppedError):
                        trainer.train()
    logged = history(trainer, "grad_norm", "train_loss", "total_flos")
    assert logged == history(whole, "grad_norm", "train_loss", "total_flos")[-len(logged) :]
    for name in ("global_step", "best_metric", "best_global_step"):
        assert getattr(trainer.state, name) == getattr(whole.state, name)
    folder = tmp_path / "b" / f"checkpoint-{whole.state.global_step // 3 * 3}"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    saved = LlamaForCausalLM.from_pretrained(folder)
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "a" / folder.name)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in expected.state_dict().items())


def test_new_cluster_resumes_from_a_checkpoint_that_save_steps_has_made(tmp_path: Path) -> None:
    expected = plain_trainer(tmp_path / "a")
    expected.train()
    for stop_after in (7, None):
        with (
            shardwell.testing.in_process_cluster(),
            shardwell.join(run="r", checkpoint_dir=str(tmp_path / "saved"), resume="latest") as session,
        ):
            calls = [Recorder(stop_after)]
            trainer = sharded_trainer(session, tmp_path / "b", callbacks=calls, save_strategy="steps", save_steps=5)
            if stop_after:
                with pytest.raises(StoppedError):
                    trainer.train()
            else:
                assert session.step == 5
                trainer.train()
                assert_same(trainer, expected)


def test_trainer_that_lost_its_place_goes_on_at_the_step_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's next step is another one than the Trainer's, as after a rollback."""
    plain = plain_trainer(tmp_path, include_num_input_tokens_seen="all")
    plain.train()
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path, include_num_input_tokens_seen="all")
        compute, computed = trainer._compute, []

        def compute_and_leave(step: Any, model: Any) -> None:
            compute(step, model)
            computed.append(step.number)
            if len(computed) == 4:
                session.in_flight.iteration.void(step.number, "a test")

        monkeypatch.setattr(trainer, "_compute", compute_and_leave)
        trainer.train()
        assert computed == [0, 1, 2, 3, 3, *range(4, 12)]
        assert trainer.state.global_step == 12 and session.step == 12
    assert trainer.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
    assert trainer.state.total_flos == plain.state.total_flos


def test_second_train_of_a_finished_trainer_trains_nothing(tmp_path: Path) -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path, max_steps=2)
        assert trainer.train().global_step == 2
        before = weights(trainer)
        trainer.train()
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_second_trainer_of_a_process_continues_where_the_first_has_ended(tmp_path: Path) -> None:
    with shardwell.testing.in_process_cluster():
        with shardwell.join() as session:
            sharded_trainer(session, tmp_path, max_steps=1, eval_strategy="no").train()
        with shardwell.join() as session:
            first = sharded_trainer(session, tmp_path, max_steps=3, eval_strategy="no")
            first.train()
            given = arguments(sharded.TrainingArguments, tmp_path, max_steps=5, eval_strategy="no")
            second = sharded.Trainer(first.model, given, train_dataset=Tokens(22))
            assert second.train().global_step == session.step == 5


def test_trainer_without_the_state_of_the_run_ends_with_an_error(tmp_path: Path) -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path, max_steps=3, eval_strategy="no")
        trainer.train()
        trainer.state.global_step = 1
        trainer.args.max_steps = 5
        with pytest.raises(StepRestartedError, match=r"run is at step 3, and the Trainer is at step 1, and .* again"):
            trainer.train()


def test_schedule_with_milestones_and_callbacks_of_one_class_continue(tmp_path: Path) -> None:
    with shardwell.testing.in_process_cluster():
        for max_steps in (2, 4):
            with shardwell.join() as session:
                model = tiny_llama()
                shardwell.auto_wrap(model, session)
                optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.08)
                schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3], gamma=0.5)
                stopping = [transformers.EarlyStoppingCallback(patience) for patience in (7, 9)]
                given = arguments(
                    sharded.TrainingArguments,
                    tmp_path,
                    max_steps=max_steps,
                    eval_steps=2,
                    metric_for_best_model="loss",
                )
                trainer = sharded.Trainer(
                    model,
                    given,
                    train_dataset=Tokens(22),
                    eval_dataset=Tokens(2),
                    optimizers=(optimizer, schedule),
                    callbacks=list(stopping),
                )
                trainer.train()
                states = trainer._tracked.state_dict()["state"]["stateful_callbacks"]["EarlyStoppingCallback"]
                assert [state["args"]["early_stopping_patience"] for state in states] == [7, 9]
        assert optimizer.param_groups[0]["lr"] == 0.04


class OwnLoaderTrainer(sharded.Trainer):
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def refused(session: shardwell.Session, folder: Path, case: str) -> None:
    match case:
        case "a plain model":
            sharded.Trainer(tiny_llama(), arguments(sharded.TrainingArguments, folder))
        case "torch's optimizer":
            model = tiny_llama()
            shardwell.auto_wrap(model, session)
            given = arguments(sharded.TrainingArguments, folder, eval_strategy="no")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sharded.Trainer(model, given, train_dataset=Tokens(8), optimizers=(optimizer, None)).train()
        case "adafactor":
            sharded_trainer(session, folder, optim="adafactor").train()
        case "fp16" | "auto_find_batch_size":
            sharded_trainer(session, folder, **{case: True})
        case "load_best_model_at_end":
            sharded_trainer(session, folder, load_best_model_at_end=True, save_strategy="steps", save_steps=3)
        case "resume_from_checkpoint":
            sharded_trainer(session, folder).train(resume_from_checkpoint=True)
        case "a loader":
            model = tiny_llama()
            shardwell.auto_wrap(model, session)
            given = arguments(sharded.TrainingArguments, folder, eval_strategy="no")
            OwnLoaderTrainer(model, given, train_dataset=Tokens(8)).train()
        case "a stream":
            trainer = sharded_trainer(session, folder, max_steps=2)
            trainer.train_dataset = Stream()
            trainer.train()


@pytest.mark.parametrize(
    ("case", "advice"),
    [
        ("a plain model", r"call shardwell\.auto_wrap\(model, session\)"),
        ("torch's optimizer", r"pass optimizers=\(shardwell\.optim\.AdamW"),
        ("adafactor", r"pass optimizers=\(shardwell\.optim\.AdamW"),
        ("fp16", "Use bf16=True"),
        ("auto_find_batch_size", "same batch size"),
        ("load_best_model_at_end", "best_model_checkpoint"),
        ("resume_from_checkpoint", r"Call train\(\) without it"),
        ("a loader", r"class MyTrainer\(Trainer, ThatClass\)"),
        ("a stream", "pass a dataset with __len__"),
    ],
)
def test_what_does_not_fit_is_refused(case: str, advice: str, tmp_path: Path) -> None:
    with (
        shardwell.testing.in_process_cluster(),
        shardwell.join() as session,
        pytest.raises(UsageError, match=advice),
    ):
        refused(session, tmp_path, case)


def test_steps_of_another_loop_are_refused(tmp_path: Path) -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        trainer = sharded_trainer(session, tmp_path)
        optimizer = shardwell.optim.SGD(trainer.model.parameters(), lr=0.1)
        tokens = torch.ones(1, 4, dtype=torch.long)
        trainer.model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        with pytest.raises(UsageError, match=r"start another run, shardwell\.join\(run=NAME\)"):
            trainer.train()


def test_launcher_is_hidden_from_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    given = arguments(sharded.TrainingArguments, tmp_path)
    assert (given.world_size, given.process_index, given.parallel_mode.value) == (1, 0, "not_parallel")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name == "transformers" or name.startswith("transformers."):
            monkeypatch.setitem(sys.modules, name, None)  # an import raises ModuleNotFoundError
    monkeypatch.delitem(sys.modules, "shardwell.integrations.transformers")
    with pytest.raises(ImportError, match=r"cannot import transformers.*pip install"):
        importlib.import_module("shardwell.integrations.transformers")
