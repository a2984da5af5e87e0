"""Checks planned tensor parallelism on Hugging Face families: right, or refused before a step.

    python -m benchmarks.families [FAMILY ...]

Two trainers train a tiny model of each family with SGD, with and without sequence parallelism, and one process trains
the same model on the same batches. All parameters are drawn, so that no norm is a vector of ones. A family is ``right``
if the largest difference of a weight is at most 1e-6, and ``refused`` if ``plan_tensor_parallel`` raises. Anything else
fails the check.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import shardwell
from benchmarks.report import RESULTS
from shardwell.parallel import plan_tensor_parallel

ROOT = Path(__file__).resolve().parents[1]
TP, STEPS, BATCH, LENGTH, VOCABULARY, WIDTH = 2, 2, 4, 16, 64, 32
LEARNING_RATE = 0.05
TOLERANCE = 1e-6
"""Largest difference of a weight after all steps. Weights are about 1, with 7 digits."""
LIMIT_S = 60.0

_BASE = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = _BASE | {"intermediate_size": 64, "max_position_embeddings": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
_DECODER |= {"bos_token_id": 1, "eos_token_id": 2}
_GPT = {"vocab_size": VOCABULARY, "use_cache": False}
_NO_GPT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "apertus": ("ApertusConfig", "ApertusForCausalLM", _DECODER),
    "bert": ("BertConfig", "BertForMaskedLM", _ENCODER | _NO_DROPOUT),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        _GPT | {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", _DECODER),
    "cohere-qk-norm": ("CohereConfig", "CohereForCausalLM", _DECODER | {"use_qk_norm": True}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", _DECODER),
    "deberta-v2": ("DebertaV2Config", "DebertaV2ForMaskedLM", _ENCODER | _NO_DROPOUT),
    "deberta-v3": (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        _ENCODER | _NO_DROPOUT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True},
    ),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
        | {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 64},
    ),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", _ENCODER | _NO_DROPOUT | {"embedding_size": WIDTH}),
    "ernie4.5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", _DECODER),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", _DECODER),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        _BASE | {"use_cache": False, "new_decoder_architecture": False, "multi_query": True},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _DECODER | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _DECODER | {"head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _DECODER | {"head_dim": 8}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", _DECODER | {"head_dim": 8}),
    "gpt-neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        _GPT
        | {"hidden_size": WIDTH, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4}
        | {"max_position_embeddings": 64, "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _ENCODER | {"use_cache": False, "hidden_dropout": 0.0}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT | {"n_embd": WIDTH, "n_layer": 2, "n_head": 4} | _NO_GPT_DROPOUT),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        _GPT | {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64} | _NO_GPT_DROPOUT,
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _DECODER),
    "hunyuan": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", _DECODER | {"head_dim": 8}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "llama-bias": ("LlamaConfig", "LlamaForCausalLM", _DECODER | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _DECODER),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", _BASE | {"intermediate_size": 64, "pad_token_id": 0}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", _DECODER),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _DECODER),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _DECODER),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        _BASE
        | {"ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": WIDTH}
        | {"use_cache": False, "pad_token_id": 1},
    ),
    "persimmon": (
        "PersimmonConfig",
        "PersimmonForCausalLM",
        _ENCODER | {"use_cache": False, "pad_token_id": 0, "hidden_dropout": 0.0},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", _DECODER | {"resid_pdrop": 0.0}),
    "phi-qk-norm": ("PhiConfig", "PhiForCausalLM", _DECODER | {"resid_pdrop": 0.0, "qk_layernorm": True}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _DECODER),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 8}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _ENCODER | _NO_DROPOUT | {"pad_token_id": 1}),
    "seed-oss": (
        "SeedOssConfig",
        "SeedOssForCausalLM",
        _DECODER | {"head_dim": 8, "attention_bias": True, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _DECODER),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _DECODER),
    "stablelm-qk-norm": ("StableLmConfig", "StableLmForCausalLM", _DECODER | {"qk_layernorm": True}),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        _DECODER | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0},
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        | {"image_size": 16, "patch_size": 4, "num_labels": 10}
        | _NO_DROPOUT,
    ),
}
"""Classes of transformers for the config and the model, and the config's arguments, by family."""

_FUSED_BY_HEAD = ("bloom", "falcon", "gpt-neox", "persimmon")
"""Families with a fused projection whose rows are ordered by head."""


@dataclass(frozen=True)
class Case:
    """One family with one plan."""

    family: str
    sequence_parallel: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """Options of ``plan_tensor_parallel``."""
        return {"sequence_parallel": self.sequence_parallel, "fused_by_head": self.family in _FUSED_BY_HEAD}


@dataclass(frozen=True)
class Verdict:
    """What a case has shown."""

    case: Case
    result: str
    """``right``, ``refused``, ``wrong`` or ``error``."""
    detail: str
    """The largest difference, or the message."""

    @property
    def passes(self) -> bool:
        """Whether the family may be used with this plan, or cannot be."""
        return self.result in {"right", "refused"}


def make(family: str) -> nn.Module:
    """Returns a tiny model of a family, with drawn values in all parameters."""
    import transformers  # imported by the processes that make models only

    transformers.logging.set_verbosity_error()
    config, model_class, arguments = FAMILIES[family]
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, model_class)(getattr(transformers, config)(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def batch(step: int, dp_rank: int) -> torch.Tensor:
    """Returns tokens. [BATCH, LENGTH + 1]"""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a model; of images that are drawn from the tokens if it takes images."""
    if model.main_input_name == "pixel_values":
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        pixels = torch.randn(BATCH, 3, model.config.image_size, model.config.image_size, generator=generator)
        return functional.cross_entropy(model(pixel_values=pixels).logits, tokens[:, 0] % model.config.num_labels)
    logits = model(input_ids=tokens[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def check(case: Case, rank: int, address: str, run: str) -> Verdict:
    """Trains a case as one of the tensor-parallel ranks, and compares the weights with those of one process."""
    model = make(case.family)
    try:
        plan = plan_tensor_parallel(model, TP, **case.options)
    except shardwell.UsageError as error:
        return Verdict(case, "refused", str(error))
    try:
        found = _train(plan, model, make(case.family), rank, address, run)
    except Exception as error:
        return Verdict(case, "error", f"{type(error).__name__}: {error}"[:1000])
    expected = _train_alone(make(case.family))
    distances = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    worst = max(distances, key=distances.__getitem__)
    if distances[worst] <= TOLERANCE:
        return Verdict(case, "right", f"{distances[worst]:.1e}")
    return Verdict(case, "wrong", f"{worst} is {distances[worst]:.1e} from one process")


def _train(plan: Any, model: nn.Module, whole: nn.Module, rank: int, address: str, run: str) -> dict[str, Any]:
    waits = shardwell.WaitOptions(wait_limit_s=LIMIT_S)
    world = shardwell.World(tp=TP)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here", waits=waits) as session:
        plan.apply(model, session.replica_mesh()["tp"])
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for step in session.steps(STEPS):
            for tokens in step.batches(batch):
                loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        with shardwell.attach(address, run=run) as reader:
            reader.follow(whole)
    return {name: value.detach().clone() for name, value in whole.state_dict().items()}


def _train_alone(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check_all(cases: Sequence[Case], address: str) -> list[Verdict]:
    """Checks cases in two trainer processes. A process that dies costs the case that it was at."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(cases):
        left = cases[len(verdicts) :]
        found = _check_in_processes(left, address, f"{len(verdicts)}-{time.time_ns()}")
        verdicts += found
        if len(found) < len(left):
            verdicts.append(Verdict(left[len(found)], "error", "a process died or did not answer"))
    return verdicts


def _check_in_processes(cases: Sequence[Case], address: str, name: str) -> list[Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(rank)) for rank in range(TP)]
        text = json.dumps([asdict(case) for case in cases])
        command = [sys.executable, "-m", "benchmarks.families", "--address", address, "--run", name, "--cases", text]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, "--rank", str(rank), "--output", str(path)], cwd=ROOT, env=environment)
            for rank, path in enumerate(paths)
        ]
        try:
            for process in processes:
                process.wait(LIMIT_S * (len(cases) + 2))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths if path.exists()]
    by_rank = [[Verdict(Case(**row.pop("case")), **row) for row in of_rank] for of_rank in rows]
    return [max(pair, key=lambda verdict: not verdict.passes) for pair in zip(*by_rank, strict=False)]


def _serve(arguments: argparse.Namespace) -> None:
    """Checks cases as one rank; writes one line for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with Path(arguments.output).open("w") as file:
        for number, fields in enumerate(json.loads(arguments.cases)):
            case = Case(**fields)
            verdict = check(case, arguments.rank, arguments.address, f"{arguments.run}-{number}")
            print(json.dumps(asdict(verdict)), file=file, flush=True)
    os._exit(0)  # see tests/support/gloo.py


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns the results as a table in Markdown, one row per family."""
    rows: dict[str, dict[bool, Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.case.family, {})[verdict.case.sequence_parallel] = verdict
    lines = ["| family | tp=2 | `sequence_parallel=True` | why refused |", "|---|---|---|---|"]
    for family, found in rows.items():
        cells = [_cell(found.get(split)) for split in (False, True)]
        reasons = [verdict.detail for _, verdict in sorted(found.items()) if verdict.result != "right"]
        lines.append(f"| {family} | {cells[0]} | {cells[1]} | {_short(reasons[0]) if reasons else ''} |")
    return "\n".join(lines)


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    return verdict.detail if verdict.result == "right" else verdict.result


def _short(reason: str) -> str:
    reason = reason.partition(". ")[0].replace("|", "/")
    return reason if len(reason) <= 90 else f"{reason[:87]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"default: all of {', '.join(FAMILIES)}")
    parser.add_argument("--save", action="store_true", help=f"write the table to {RESULTS.name}/families.md")
    for name in ("address", "run", "cases", "output"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        _serve(arguments)
    if unknown := set(arguments.families) - FAMILIES.keys():
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    cases = [Case(family, split) for family in arguments.families or FAMILIES for split in (False, True)]
    with shardwell.LocalCluster(num_shards=1) as cluster:
        verdicts = check_all(cases, cluster.address)
    print(table(verdicts))
    for verdict in verdicts:
        if not verdict.passes:
            print(f"{verdict.case}: {verdict.result}: {verdict.detail}")
    if arguments.save:
        versions = f"torch {torch.__version__}, transformers {importlib.metadata.version('transformers')}"
        head = (
            f"`python -m benchmarks.families --save`, {time.strftime('%Y-%m-%d')}, {versions}: largest difference of a "
            f"weight from one process after {STEPS} steps of SGD, or refused before a step."
        )
        (RESULTS / "families.md").write_text(f"{head}\n\n{table(verdicts)}\n")
    sys.exit(not all(verdict.passes for verdict in verdicts))


if __name__ == "__main__":
    main()
