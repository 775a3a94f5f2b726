"""The command line: a command is a config class and the function that takes it.

Nothing heavy is imported before a command runs, so that `--help` and mistakes in options answer at once.
"""

import dataclasses
import importlib
import inspect
import io
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from npeff.collect.config import CollectConfig
from npeff.config import ReplayConfig
from npeff.models.config import confirm_trust
from npeff.utils import UserError, __version__, out_of_memory, read_object
from npeff.utils.configs import Record, check_numbers, did_you_mean, field_docs, from_dict, refuse_old


class Command(Record):
    """What stands behind a word of the command line."""

    room: str
    """Folder of the package that it belongs to; empty for what goes through all rooms."""
    config: str
    """Class with the options, in the room's light module `config`; a union of classes has subcommands."""
    function: str
    """module:function of the room that takes the config; the module may import torch, which takes seconds. A star is
    the name of the subcommand."""
    what: str
    """What it does, in a line."""

    def load_config(self) -> Any:
        """The config class, or a union of them."""
        return self._load("config", self.config)

    def load_function(self, subcommand: str = "") -> Any:
        """The function that does it."""
        return self._load(*self.function.replace("*", subcommand).split(":"))

    def _load(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(".".join(filter(None, ("npeff", self.room, module)))), name)


COMMANDS = {
    "demo": Command("", "DemoConfig", "demo:demo", "components of the embedded model, and a page to look at"),
    "params": Command("models", "ParamsConfig", "params:params", "which parameters of a model are selected"),
    "check": Command("collect", "CheckConfig", "check:check", "do this model and task fit? a minute tells"),
    "collect": Command("collect", "CollectConfig", "run:collect_or_estimate", "make a run: per-example Fishers"),
    "decompose": Command("decompose", "DecomposeConfig", "run:decompose", "find the components of a run"),
    "analyse": Command("analyse", "AnalyseConfig", "run:analyse", "what each component is tuned to"),
    "probe": Command("analyse", "ProbeConfig", "probe:probe", "which components a new text uses"),
    "compare": Command("analyse", "CompareConfig", "compare:compare", "all methods side by side on one run"),
    "stability": Command("analyse", "StabilityConfig", "stability:stability", "do other seeds find the same?"),
    "sweep": Command("analyse", "SweepConfig", "sweep:sweep", "how many components to take"),
    "spectra": Command("analyse", "SpectraConfig", "spectra:spectra", "how fast the Fishers' eigenvalues fall"),
    "perturb": Command("perturb", "PerturbConfig", "run:perturb", "change the model along components, and measure"),
    "explain": Command("explain", "ExplainConfig", "run:explain", "words, answers, heads and names of components"),
    "casestudy": Command("explain", "CaseStudyConfig", "casestudy:casestudy", "a component's words removed, swapped"),
    "diff": Command("act", "DiffConfig", "diff:diff", "what differs between two models on the same examples"),
    "steer": Command("act", "SteerConfig", "steer:steer", "answers and text with a component turned up or down"),
    "explore": Command("explore", "ExploreConfig", "server:explore", "look at a run in the browser"),
    "export": Command("explore", "ExportConfig", "export:export", "write a run as pages that open from disk"),
    "themes": Command("explore", "ThemesConfig", "themes:themes", "list or export the themes given to components"),
    "study": Command("study", "StudyConfig", "*:*", "a blind study: do people see a theme in components?"),
    "push": Command("share", "PushConfig", "run:push", "share a run in a folder or on the Hugging Face Hub"),
    "pull": Command("share", "PullConfig", "run:pull", "get a shared run, checked by hash"),
    "reproduce": Command("paper", "ReproduceConfig", "reproduce:reproduce", "measure a table of the paper"),
    "icl": Command("paper", "IclConfig", "icl:icl", "is few-shot learning explained by components?"),
    "verify": Command("", "VerifyConfig", "verify:verify", "find damaged files of a run, and repair them"),
    "replay": Command("", "ReplayConfig", "cli:replay", "run again what made a run, from its own config"),
}
"""In the order of the pipeline."""
RENAMED = {"evalkit": "study", "labels": "themes"}
"""Commands of earlier versions."""
INTERRUPTED = 130
REPLAYED = ("collect", "decompose", "perturb")
"""Commands that write only below the run. What a directory from elsewhere names besides is not run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Those of the process, without its name, if not given.

    Returns:
        The exit code: 0, 2 for a user's mistake, 130 after Ctrl-C.

    Raises:
        Exception: A mistake of ours; its traceback is what is needed to correct it.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows few characters is no reason to stop
    name = arguments[0] if arguments else "--help"
    try:
        _run(name, arguments[1:])
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept: the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        reason = _reason(error)
        if reason is None:  # a mistake of ours: the traceback is what is needed to correct it
            raise
        print(f"npeff{f' {name}' if name in COMMANDS else ''}: {reason}", file=sys.stderr)
        return 2
    return 0


def _run(name: str, arguments: list[str]) -> None:
    if name in ("-h", "--help", "help"):
        print(_overview())
    elif name == "--version":
        print(__version__)
    elif name in RENAMED:
        raise UserError(f"`npeff {name}` is now `npeff {RENAMED[name]}`.")
    elif name not in COMMANDS:
        raise UserError(f"There is no command {name!r}.{did_you_mean(name, COMMANDS)} `npeff --help` lists them.")
    elif {"-h", "--help"} & set(arguments):
        print(_help(name, arguments[0]))
    else:
        config = parse(name, arguments)
        COMMANDS[name].load_function(arguments[0] if arguments else "")(config)


def _reason(error: Exception) -> str | None:
    """What to say about a mistake of the user, or of the machine: its memory, its disk, or the name of a file."""
    if isinstance(error, UserError):
        return str(error)
    if out_of_memory(error):
        return (
            "there is not enough memory. Free some, or lower --batch-tokens and --shard-examples (collect), "
            "--chunk and --memory-gb (decompose, perturb). Run the command again; it continues."
        )
    if not isinstance(error, OSError):
        return None
    return f"{error.strerror or error}{f': {str(error.filename)[:200]}' if error.filename else ''}."


def parse(name: str, arguments: Sequence[str]) -> Any:
    """The config of a command from its arguments.

    Args:
        name: One of `COMMANDS`.
        arguments: What stands behind it on the command line.

    Returns:
        The config.

    Raises:
        UserError: An option or argument is not known, or was called differently in an earlier version. What else is
            wrong with one tyro says itself, with exit code 2.
    """
    kind = COMMANDS[name].load_config()
    kinds = _subcommands(kind)
    current = kinds.get(arguments[0], kind) if kinds and arguments else kind
    for argument in arguments if not _subcommands(current) else ():
        if argument.startswith("--"):
            refuse_old(current, argument[2:].partition("=")[0].replace("-", "_"), form="--{}")
    style = (tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
    config, unknown = tyro.cli(kind, prog=f"npeff {name}", args=arguments, config=style, return_unknown_args=True)
    if unknown:
        raise UserError(_unknown(type(config), unknown[0], arguments, name))
    check_numbers(config)
    return config


def _unknown(kind: Any, word: str, arguments: Sequence[str], name: str) -> str:
    """What to say about a word that no option takes."""
    more = f" `npeff {name} --help` lists all options."
    if word.startswith("-"):
        options = [option for line in _lines(kind) for option in line.names]
        return f"there is no option {word.partition('=')[0]}.{did_you_mean(word.partition('=')[0], options)}{more}"
    before = [each for each in arguments[: arguments.index(word)] if each.startswith("--")] if word in arguments else []
    line = next((line for line in _lines(kind) if before and before[-1] in line.names), None)
    hint = f" {before[-1]} takes {'one value' if line.value else 'no value'}." if line else ""
    return f"nothing takes the argument {word!r}.{hint}{more}"


# --- replay -------------------------------------------------------------------------------------------------


def replay(config: ReplayConfig) -> Any:
    """Call the command that made a run, a decomposition or a perturbation again, with the config that is kept there.

    Args:
        config: What to make again, and where.

    Returns:
        What the command returns.

    Raises:
        UserError: There is nothing to replay, or a command that is not for replaying.
    """
    path = Path(config.made)
    file = next((path / name for name in ("manifest.json", "config.json") if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} has neither manifest.json nor config.json, so there is nothing to replay.")
    home = path if file.name == "manifest.json" else path.parent.parent  # of decompositions/NAME, perturbations/NAME
    recorded = read_object(file)
    notes = recorded.get("notes")
    if isinstance(notes, dict):  # a decomposition's own config is that of its estimator
        recorded = notes.get("replay", recorded)
    command = recorded.get("command") if isinstance(recorded, dict) else None
    if command not in REPLAYED:
        raise UserError(f"{file} does not name one of {', '.join(REPLAYED)}.")
    again = from_dict(COMMANDS[command].load_config(), recorded.get("config", {}))
    if isinstance(again, CollectConfig):
        confirm_trust(again.model, file)
    again = replace(again, run=config.to or str(home))
    return COMMANDS[command].load_function()(again)


# --- help ---------------------------------------------------------------------------------------------------------


class _Line(Record):
    """An option or argument as `--help` shows it."""

    names: tuple[str, ...]
    """None for an argument."""
    value: str
    text: str
    group: str
    """What it is about, for options of a nested config."""


def _subcommands(kind: Any) -> dict[str, Any]:
    """Name → config class of the subcommands, for a union of configs."""
    if isinstance(kind, type):
        return {}
    parts = [typing.get_args(part) for part in typing.get_args(kind)]  # Annotated[config, its name]
    return {subcommand.name: part for part, subcommand in parts}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: npeff COMMAND [options]     (npeff COMMAND --help tells more)"]
    room = None
    for name, command in COMMANDS.items():
        if command.room != room:
            lines += ["", (command.room or ("whole runs" if room else "try it")).capitalize()]
            room = command.room
        lines.append(f"  {name:{width}}  {command.what}")
    return "\n".join(lines)


def _help(name: str, first: str) -> str:
    """Usage of a command: what most people set first, the rest under headings of its own."""
    kind = COMMANDS[name].load_config()
    kinds = _subcommands(kind)
    if kinds and first not in kinds:
        about = [f"  {sub:8}  {(inspect.getdoc(part) or '').splitlines()[0]}" for sub, part in kinds.items()]
        return f"usage: npeff {name} {{{','.join(kinds)}}} ...\n\n" + "\n".join(about)
    if kinds:
        name, kind = f"{name} {first}", kinds[first]
    arguments = [line for line in _lines(kind) if not line.names]
    options = {line.names[0]: line for line in _lines(kind) if line.names}
    leading = [options.pop(f"--{name.replace('_', '-')}") for name in getattr(kind, "common", ())]
    usage = " ".join(["usage: npeff", name, *(line.value for line in arguments), "[options]"])
    blocks = [usage, inspect.getdoc(kind) or "", _block("arguments", arguments), _block("options", leading)]
    for group in dict.fromkeys(line.group for line in options.values()):
        title = "options" if not leading and not group else f"more options{f': {group}' if group else ''}"
        blocks.append(_block(title, [line for line in options.values() if line.group == group]))
    return "\n\n".join(filter(None, blocks))


def _lines(kind: Any, group: str = "") -> Iterator[_Line]:
    hints, docs = typing.get_type_hints(kind, include_extras=True), field_docs(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if has_marker(hint, "Suppress"):
            continue
        if dataclasses.is_dataclass(hint):
            yield from _lines(hint, (inspect.getdoc(hint) or field.name).splitlines()[0].rstrip(".").lower())
            continue
        option, text, default = f"--{field.name.replace('_', '-')}", docs.get(field.name, ""), default_text(field)
        if has_marker(hint, "Positional"):
            value = _value(hint, field.name.upper())
            yield _Line((), value if field.default is dataclasses.MISSING else f"[{value}]", text, group)
            continue
        names = (option, f"--no-{option[2:]}") if hint is bool else (option,)
        value = "" if bool in (hint, *typing.get_args(hint)) else _value(hint)
        yield _Line(names, value, f"{text} (default: {default})" if default else text, group)


def _value(hint: Any, text: str = "TEXT") -> str:
    """What an option takes; `text` is what a text is called."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _value(parts[0], text)
    if origin is typing.Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin is tuple:
        return f"{_value(parts[0], text)} ..."
    plain = next((part for part in parts if part is not type(None)), hint)
    return {int: "N", float: "X", str: text}.get(plain) or _value(plain, text)


def has_marker(hint: Any, name: str) -> bool:
    """Whether a type is annotated with one of tyro's markers."""
    marked = typing.get_args(getattr(tyro.conf, name)[int])[1]
    return typing.get_origin(hint) is typing.Annotated and marked in typing.get_args(hint)[1:]


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default of an option as people would write it; empty where there is none."""
    if field.default is dataclasses.MISSING or field.default in (None, ()):
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return " ".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default)


def _block(title: str, lines: Sequence[_Line]) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    shown = []
    for line in lines:
        head = f"{', '.join(line.names)} {line.value}".strip()
        text = textwrap.wrap(re.sub(r"\s+", " ", line.text), width - 8, break_long_words=False)
        shown += [f"  {head}", *(f"      {each}" for each in text)]
    return "\n".join([f"{title}:", *shown]) if lines else ""


if __name__ == "__main__":
    sys.exit(main())
