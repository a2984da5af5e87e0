"""``shardwell completion``: prints a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

from shardwell.command.arguments import Subparsers, add_command
from shardwell_wire.errors import ShardwellError

_DESCRIPTION = """\
Prints a script that completes the commands of shardwell, their options and the values of these. The script knows the
commands of this version: make it again after an update.
"""
_EPILOG = """\
examples:
  shardwell completion bash > ~/.local/share/bash-completion/completions/shardwell
  shardwell completion zsh > ~/.shardwell.zsh       then `source ~/.shardwell.zsh` in ~/.zshrc, after compinit
"""

_SCRIPT = """\
_shardwell() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if (( COMP_CWORD == 1 )); then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
            *)
                [[ "$current" == -* ]] && case "${{COMP_WORDS[1]}}" in
{options}
                esac
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _shardwell shardwell
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def add_parser(subparsers: Subparsers, build_parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Adds ``shardwell completion``.

    Args:
        subparsers: The subcommands.
        build_parser: Returns the parser of the whole command. See ``cli.build_parser``.
    """
    parser = add_command(
        subparsers,
        "completion",
        "print a script that completes commands and options in bash or zsh",
        partial(_print_script, build_parser),
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell")


def _print_script(build_parser: Callable[[str | None], argparse.ArgumentParser], arguments: argparse.Namespace) -> int:
    try:
        commands = _commands(build_parser(None))
    except (ImportError, ShardwellError):  # without torch, the commands that need it get no options
        commands = _commands(build_parser("completion"))
    values = [
        f"            {'|'.join(_quoted(name, option) for option in action.option_strings)}) "
        f'words="{" ".join(map(str, action.choices))}" ;;'
        for name, parser in commands.items()
        for action in parser._actions
        if action.choices and action.option_strings
    ]
    options = [
        f'                    {name}) words="{" ".join(_options(parser))}" ;;' for name, parser in commands.items()
    ]
    script = _SCRIPT.format(commands=" ".join(commands), values="\n".join(values), options="\n".join(options))
    print(f"{_ZSH if arguments.shell == 'zsh' else ''}{script}", end="")
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the subcommands by name."""
    return next(dict(each.choices) for each in parser._actions if isinstance(each.choices, dict))


def _quoted(command: str, option: str) -> str:
    """Returns the pattern of a command and the option before the cursor."""
    return f'"{command} {option}"'


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    return (option for action in parser._actions for option in action.option_strings if option.startswith("--"))
