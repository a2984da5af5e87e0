"""Serves text from a small GPT while it trains.

    python examples/serve_while_training.py

A training process starts on a private cluster. This process attaches to the run as a reader: it has no rank, and
training does not wait for it. It loads every version that it has time for into a plain PyTorch model, and answers
`GET /?prompt=The` with text that the model writes. Each answer comes from exactly one version.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import urlopen

import torch
from corpus import Corpus
from gpt import GPT, GPTConfig, generate

import shardwell

TRAIN = Path(__file__).with_name("train_gpt.py")
RUN = "gpt"


class LiveModel:
    """A plain model that follows the run. Thread-safe.

    Args:
        reader: Reads the run.
        model: The model, with the names of ``train_gpt.py``.
        corpus: Text and vocabulary.
    """

    def __init__(self, reader: shardwell.Reader, model: GPT, corpus: Corpus) -> None:
        self._reader, self._model, self._corpus = reader, model, corpus
        self._lock = threading.Lock()
        self.version = -1

    def follow(self) -> int:
        """Loads the newest version; returns it."""
        with self._lock:
            self.version = self._reader.follow(self._model)
        return self.version

    def write(self, prompt: str, num_tokens: int = 24) -> tuple[int, str]:
        """Returns the version and the text that it writes after a prompt. Raises KeyError for unknown words."""
        tokens = self._corpus.vocabulary.encode(prompt)
        with self._lock, torch.no_grad():
            return self.version, self._corpus.vocabulary.decode(generate(self._model, tokens, num_tokens))


def main() -> None:
    arguments = parse_arguments()
    corpus = Corpus.read(arguments.text, vocab_size=arguments.vocab_size)
    with shardwell.LocalCluster(num_shards=2) as cluster, start_training(cluster.address, arguments) as training:
        try:
            with attach(cluster.address, training) as reader:
                config = GPTConfig(vocab_size=len(corpus.vocabulary), context=arguments.context)
                serve(LiveModel(reader, GPT(config), corpus), training, arguments)
        finally:
            training.terminate()  # ends at once if the training has ended


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serves text from a small GPT while it trains.")
    parser.add_argument("--text", metavar="FILE", help="English text (default: Python's language reference)")
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=64, help="tokens per window")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--port", type=int, default=0, help="port of the HTTP server (default: a free port)")
    parser.add_argument("--prompt", default="The", help="prompt of the samples that are printed")
    return parser.parse_args()


def start_training(address: str, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Starts the training in a process of its own."""
    options = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("num-steps", "context", "vocab-size")
    ]
    text = ["--text", arguments.text] if arguments.text else []
    return subprocess.Popen(
        [sys.executable, str(TRAIN), *options, *text],
        env={**os.environ, "SHARDWELL_ADDRESS": address, "SHARDWELL_RUN": RUN, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def attach(address: str, training: subprocess.Popen[bytes]) -> shardwell.Reader:
    """Attaches to the run after its first commit: then it has all units."""
    while True:
        try:
            with ExitStack() as stack:
                reader = stack.enter_context(shardwell.attach(address, run=RUN))
                reader.wait_for(1, timeout_s=5.0)
                stack.pop_all()
                return reader
        except (shardwell.errors.NotFoundError, shardwell.errors.StepStateError, shardwell.errors.DeadlineError):
            if training.poll() is not None:
                sys.exit("the training ended before it had weights")
            time.sleep(0.2)


def serve(live: LiveModel, training: subprocess.Popen[bytes], arguments: argparse.Namespace) -> None:
    """Serves until the training ends. Prints a sample now and then, and one of the last version, over HTTP."""
    live.follow()
    server = ThreadingHTTPServer(("localhost", arguments.port), handler_of(live))
    url = f"http://localhost:{server.server_address[1]}/?prompt={quote(arguments.prompt)}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"serving at {url}", flush=True)
    print_sample(url)
    printed_s = time.monotonic()
    try:
        while training.poll() is None:
            live.follow()
            if time.monotonic() - printed_s > 2.0:
                print_sample(url)
                printed_s = time.monotonic()
            time.sleep(0.1)
        live.follow()
        print_sample(url)
    finally:
        server.shutdown()
        server.server_close()


def print_sample(url: str) -> None:
    with urlopen(url) as answer:
        sample = json.load(answer)
    print(f"version {sample['version']:4}: {' '.join(sample['text'].split())}", flush=True)


def handler_of(live: LiveModel) -> type[BaseHTTPRequestHandler]:
    """Returns a handler of HTTP requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            prompt = parse_qs(urlsplit(self.path).query).get("prompt", ["The"])[0]
            try:
                version, text = live.write(prompt)
            except KeyError as error:
                self.send_error(400, f"the word {error} is not in the training text")
                return
            body = json.dumps({"version": version, "text": text}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    return Handler


if __name__ == "__main__":
    main()
