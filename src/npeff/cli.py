"""The command line: one command per room, each generated from its config."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from npeff.utils.configs import check_numbers
from npeff.utils.errors import UserError, out_of_memory

# command → (module, config class, function, what it does); a module is imported only when its command runs
COMMANDS = {
    "demo": ("npeff.demo", "DemoConfig", "demo", "real components of the embedded model, with a page to look at"),
    "collect": (
        "npeff.collect.run",
        "CollectConfig",
        "collect_or_estimate",
        "collect per-example Fishers into a run directory",
    ),
    "decompose": ("npeff.decompose.run", "DecomposeConfig", "decompose", "find the components of a run"),
    "analyse": ("npeff.analyse.run", "AnalyseConfig", "analyse", "what is each component tuned to?"),
    "perturb": ("npeff.perturb.run", "PerturbConfig", "perturb", "change the model along components: who notices?"),
    "compare": ("npeff.analyse.compare", "CompareConfig", "compare", "all methods side by side on one run"),
    "stability": (
        "npeff.analyse.stability",
        "StabilityConfig",
        "stability",
        "do other seeds find the same components?",
    ),
    "spectra": ("npeff.analyse.spectra", "SpectraConfig", "spectra", "how fast the eigenvalues of the Fishers fall"),
    "icl": (
        "npeff.paper.icl",
        "IclConfig",
        "icl",
        "does few-shot learning use components that are there anyway?",
    ),
    "reproduce": (
        "npeff.paper.reproduce",
        "ReproduceConfig",
        "reproduce",
        "measure a table of the paper",
    ),
    "explore": ("npeff.explore.server", "ExploreConfig", "explore", "look at a run in the browser"),
    "export": ("npeff.explore.export", "ExportConfig", "export", "write a run as pages that open from disk"),
    "labels": ("npeff.explore.themes", "LabelsConfig", "labels", "list or export the labels of components"),
    "push": ("npeff.share.run", "PushConfig", "push", "share a run in a folder or on the Hugging Face Hub"),
    "pull": ("npeff.share.run", "PullConfig", "pull", "get a shared run, checked by hash"),
    "probe": ("npeff.decompose.probe", "ProbeConfig", "probe", "which components does a new text use?"),
    "sweep": ("npeff.analyse.sweep", "SweepConfig", "sweep", "how many components? held-out loss for several counts"),
    "check": ("npeff.collect.check", "CheckConfig", "check", "does collection fit this model and task? a minute tells"),
    "params": ("npeff.models.params", "ParamsConfig", "params", "list the parameters that are selected, with sizes"),
    "verify": ("npeff.verify", "VerifyConfig", "verify", "find damaged files of a run, and mend them"),
    "evalkit": ("npeff.study.run", "EvalkitConfig", "evalkit", "a blind study: do people see a theme in components?"),
    "replay": ("npeff.replay", "ReplayConfig", "replay", "run again what made a run, from its own config"),
}

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows few characters is no reason to stop
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] == "--version":
        import npeff

        print(npeff.__version__)
        return 0
    if arguments[0] not in COMMANDS:
        print(f"npeff has no command {arguments[0]!r}.\n\n{_overview()}", file=sys.stderr)
        return 2
    try:
        return _run(arguments[0], arguments[1:])
    except UserError as error:
        print(f"npeff {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept: the same command goes on from there.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        reason = _surroundings(error)
        if reason is None:  # a mistake of ours: the traceback is what is needed to mend it
            raise
        print(f"npeff {arguments[0]}: {reason}", file=sys.stderr)
        return 2


def _surroundings(error: Exception) -> str | None:
    """What to say about an error that comes from the machine: its memory, its disk, or the name of a file."""
    text = str(error)
    if out_of_memory(error):
        return (
            "there is not enough memory. Free some, or lower --batch-tokens and --shard-examples (collect), "
            "--chunk and --memory-gb (decompose, perturb). Run the command again; it continues."
        )
    if not isinstance(error, OSError):
        return None
    return f"{error.strerror or text}{f': {str(error.filename)[:200]}' if error.filename else ''}."


def _run(command: str, arguments: list[str]) -> int:
    module, config_class, function, _ = COMMANDS[command]
    config = parse(command, config_class, module, arguments)
    getattr(importlib.import_module(module), function)(config)
    return 0


def parse(command: str, config_class: str, module: str, arguments: list[str]) -> Any:
    """A command's config from its arguments; what it does not know is an error (exit code 2)."""
    import tyro

    kind = getattr(importlib.import_module(module), config_class)
    config = tyro.cli(
        kind, prog=f"npeff {command}", args=arguments, config=(tyro.conf.OmitArgPrefixes, tyro.conf.AvoidSubcommands)
    )
    check_numbers(config)
    return config


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (*_, what) in COMMANDS.items()]
    return "usage: npeff COMMAND [options]     (npeff COMMAND --help tells more)\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
