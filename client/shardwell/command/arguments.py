"""What the commands share: their parsers, the options that name a cluster, and what a terminal shows.

A command that shows something makes an ``Answer``. ``show`` is the only place that prints one, as a table or JSON, once
or again and again, so every command has the same formats.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias, cast

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardwell.find_credentials import find_credentials
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import DeadlineError, UnavailableError
from shardwell_wire.host.variables import variables
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Credentials
from shardwell_wire.security.tls import add_tls_arguments, has_tls_arguments, tls_options

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Handler = Callable[[argparse.Namespace], int]
"""Runs a command; returns its exit code."""
Call = Callable[[str, Any], Any]
"""Calls an rpc of the coordinator: name and request."""

DEGRADED, UNREACHABLE, INTERRUPTED = 3, 4, 130
"""Exit codes besides 0, 1 (an error) and 2 (wrong arguments): something is wrong with the cluster or its runs; a server
does not answer; Ctrl-C ended the command, as shells expect."""


_CONNECTION = "options of the connection"


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of texts. The usage omits the options of the connection, which all commands share."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        own = [action for action in actions if getattr(action.container, "title", None) != _CONNECTION]
        super().add_usage(usage, own, groups, prefix)


def add_command(
    subparsers: Subparsers,
    name: str,
    help_line: str,
    handler: Handler,
    *,
    description: str,
    epilog: str = "",
) -> argparse.ArgumentParser:
    """Adds a subcommand, whose texts keep their line breaks; returns its parser.

    Args:
        help_line: What the list of subcommands says.
        handler: Runs it.
        description: What its help says first.
        epilog: What its help says last, such as examples.
    """
    parser = subparsers.add_parser(
        name, help=help_line, description=description, epilog=epilog, formatter_class=_HelpFormatter
    )
    parser.set_defaults(handler=handler)
    return parser


def add_coordinator_arguments(
    parser: argparse.ArgumentParser,
    condition: str = "",
    *,
    timeout_s: float = 60.0,
    what: str = "an answer of the coordinator",
) -> None:
    """Adds ``--address``, ``--token-file``, ``--timeout`` and the options of TLS.

    Args:
        condition: When the arguments are used, such as ``for a run: ``.
        timeout_s: Default of ``--timeout``.
        what: What the command waits for.
    """
    connection = add_address_argument(parser, f"{condition}address of the coordinator")
    connection.add_argument(
        "--timeout",
        type=positive_seconds,
        default=timeout_s,
        metavar="S",
        help=f"{condition}seconds to wait for {what} (default: {timeout_s:g})",
    )


def add_address_argument(parser: argparse.ArgumentParser, what: str) -> argparse._ArgumentGroup:
    """Adds ``--address``, ``--token-file`` and the options of TLS; returns their group in the help."""
    group = parser.add_argument_group(_CONNECTION)
    group.add_argument(
        "--address",
        default=variables().get("SHARDWELL_ADDRESS") or "localhost:50051",
        metavar="HOST:PORT[,HOST:PORT...]",
        help=f"{what} (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    group.add_argument(
        "--token-file",
        metavar="PATH",
        help="file with the cluster's key or a token (default: the key of your local cluster at the address, else the "
        f"token in {TOKEN_VARIABLE}, else the file in {TOKEN_FILE_VARIABLE})",
    )
    add_tls_arguments(group)
    return group


def positive_seconds(text: str) -> float:
    """Parses a duration of more than 0 s, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return seconds


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Returns the credentials that the arguments name."""
    tls = tls_options(arguments) if has_tls_arguments(arguments) else None
    return find_credentials(arguments.address, arguments.token_file, tls)


@contextmanager
def open_coordinator(arguments: argparse.Namespace) -> Iterator[CoordinatorClient]:
    """Yields a client for the arguments. If the coordinator cannot be reached, the error says what to check."""
    address = arguments.address
    with closing(CoordinatorClient(address, credentials_of(arguments))) as client:
        try:
            yield client
        except UnavailableError as error:
            if error.data.get("peer") != client.peer:
                raise
            reason = (
                str(error).rpartition("last error: ")[2].rpartition("UNKNOWN: ")[2]
            )  # what gRPC's message ends with
            raise UnavailableError(
                f"no answer from a coordinator at {address} ({reason}). Start one with "
                "`shardwell-server coordinator`, or a whole cluster with `docker compose up`; or name another address "
                "with --address HOST:PORT or SHARDWELL_ADDRESS",
                **error.data,
            ) from error
        except DeadlineError as error:
            if error.data.get("peer") != client.peer:
                raise
            raise DeadlineError(
                f"the coordinator at {address} has not answered within {arguments.timeout:g} s ({error}): it is "
                "stopped, overloaded or cut off. Check its process and log, or wait longer with --timeout",
                **error.data,
            ) from error


@contextmanager
def calling(arguments: argparse.Namespace) -> Iterator[Call]:
    """Yields a function that calls an rpc of the coordinator, as ``open_coordinator``."""
    with open_coordinator(arguments) as coordinator:
        yield partial(coordinator.call, timeout_s=arguments.timeout)


def progress(*columns: ProgressColumn) -> Progress:
    """Returns a display of progress on standard error, which only a terminal shows, and only until the command ends."""
    console = Console(stderr=True, highlight=False)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def byte_columns() -> Sequence[ProgressColumn]:
    """Returns the columns of a display that counts bytes."""
    return TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()


@contextmanager
def progress_bar(what: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the block runs; yields a function that counts bytes.

    Args:
        what: What is in progress, such as ``exporting``.
        total_bytes: All bytes. None: not known.
    """
    with progress(*byte_columns()) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda count_bytes: bar.advance(task, count_bytes)


_NUMBERS = re.compile(r'\[\n((?:\s+"?-?[\d.e+-]+"?,?\n)+)\s*\]')
"""A list of numbers, one per line; 64-bit integers are in quotes."""

_UNLIMITED = 100_000
"""Width of lines that end nowhere but at their end, in characters."""
_WATCH_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command shows.

    Attributes:
        documents: What ``-o json`` prints: messages, or values that ``json`` can encode.
        view: What ``-o table`` and ``-o wide`` print.
        one_per_line: True if each document takes one line of JSON, because there may be several.
        exit_code: Exit code of the command.
    """

    documents: Sequence[Any]
    view: RenderableType
    one_per_line: bool = False
    exit_code: int = 0


def add_output_arguments(parser: argparse.ArgumentParser, *, can_watch: bool = True) -> None:
    """Adds ``--output``, ``--json`` and, if the command can be repeated, ``--watch``."""
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "wide", "json"),
        default="table",
        help="table leaves out columns that do not fit the terminal, wide prints all of them, json prints the response "
        "of the rpc (default: table)",
    )
    parser.add_argument("--json", dest="output", action="store_const", const="json", help="the same as -o json")
    if can_watch:
        parser.add_argument(
            "-w",
            "--watch",
            nargs="?",
            type=positive_seconds,
            const=_WATCH_S,
            metavar="SECONDS",
            help=f"ask again every SECONDS (default: {_WATCH_S:g}) until Ctrl-C; write it after the other arguments",
        )


def output(*, wide: bool = False) -> Console:
    """Returns a console on standard output. A pipe and ``wide`` get lines of any length."""
    return Console(width=_UNLIMITED if wide or not sys.stdout.isatty() else None, highlight=False)


def to_json(document: Any, *, indent: int | None = 2) -> str:
    """Returns a document as JSON. A message has its proto field names and all defaults. Numbers share one line."""
    value = (
        MessageToDict(document, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        if isinstance(document, Message)
        else document
    )
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def as_dict(message: Message) -> Any:
    """Returns a message as ``to_json`` prints it, as a part of a larger document."""
    return json.loads(to_json(message))


def show(arguments: argparse.Namespace, ask: Callable[[], Answer | Iterator[Answer]]) -> int:
    """Prints an answer in the format of ``--output``; with ``--watch``, every new answer until Ctrl-C.

    A terminal shows the newest answer only. A pipe gets all of them, JSON as one document per line.

    Args:
        arguments: The arguments of ``add_output_arguments``.
        ask: Returns the answer, or answers that are printed as they come. While watching, an unavailable coordinator
            does not end the command.

    Returns:
        The exit code: that of the answer, or 0 after Ctrl-C if there were several.
    """
    answer, interval_s = ask(), getattr(arguments, "watch", None)
    if isinstance(answer, Answer) and interval_s is None:
        _print(arguments, answer)
        return answer.exit_code
    try:
        if isinstance(answer, Answer):
            _watch(arguments, answer, cast(Callable[[], Answer], ask))
        else:
            for each in answer:
                _print(arguments, each)
    except KeyboardInterrupt:
        pass
    return 0


def _print(arguments: argparse.Namespace, answer: Answer, *, compact: bool = False) -> None:
    if arguments.output == "json":
        indent = None if compact or answer.one_per_line else 2
        for document in answer.documents:
            print(to_json(document, indent=indent), flush=True)
    else:
        # A name that is longer than a line is printed whole: the terminal breaks the line.
        output(wide=arguments.output == "wide").print(answer.view, crop=False)


def _watch(arguments: argparse.Namespace, answer: Answer, ask: Callable[[], Answer]) -> None:
    """Prints an answer, and then new ones until KeyboardInterrupt."""
    console = output()
    redraws = arguments.output == "table" and console.is_terminal
    with Live(console=console, auto_refresh=False) if redraws else nullcontext() as live:
        while True:
            head = Text(f"{datetime.now():%H:%M:%S}, every {arguments.watch:g} s, Ctrl-C ends", "dim")
            if live is not None:
                live.update(Group(head, answer.view), refresh=True)
            elif arguments.output == "json":
                _print(arguments, answer, compact=True)
            else:
                _print(arguments, Answer((), Group(head, answer.view, "")))
                sys.stdout.flush()
            time.sleep(arguments.watch)
            try:
                answer = ask()
            except (UnavailableError, DeadlineError) as error:
                answer = Answer(({"error": str(error)},), Text(str(error), "red"))
