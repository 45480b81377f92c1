"""The commands: one file each, named as typed, with one typed function that returns an Outcome.

The files import nothing heavy at the top, so that `anechoic --help` never loads torch. Files that begin with an
underscore, `main.py` and `options.py` are shared. Other packages add commands with an entry point of the group
`anechoic.commands`: its name is the command, its object the function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from anechoic.cli._command import command as command
from anechoic.cli._command import training_command as training_command
from anechoic.errors import UserError
from anechoic.outcome import Outcome

GROUP = "anechoic.commands"

# A command as typed -> the module and function.
COMMANDS = {
    "demo": "anechoic.cli.demo:demo",
    "pretrain": "anechoic.cli.pretrain:pretrain",
    "train": "anechoic.cli.train:train",
    "finetune": "anechoic.cli.finetune:finetune",
    "evaluate": "anechoic.cli.evaluate:evaluate",
    "embed": "anechoic.cli.embed:embed",
    "search": "anechoic.cli.search:search",
    "explore": "anechoic.cli.explore:explore",
    "sample": "anechoic.cli.sample:sample",
    "frechet": "anechoic.cli.frechet:frechet",
    "report": "anechoic.cli.report:report",
    "serve": "anechoic.cli.serve:serve",
    "export": "anechoic.cli.export:export",
    "import": "anechoic.cli.import_:import_weights",
    "sweep": "anechoic.cli.sweep:sweep",
    "list": "anechoic.cli.list:listing",
    "tools plan": "anechoic.cli.tools.plan:plan",
    "tools doctor": "anechoic.cli.tools.doctor:doctor",
    "tools shard": "anechoic.cli.tools.shard:shard",
    "tools encode-latents": "anechoic.cli.tools.encode_latents:encode_latents",
    "tools slurm": "anechoic.cli.tools.slurm:slurm",
    "tools cache": "anechoic.cli.tools.cache:cache",
}


@cache
def plugins() -> dict[str, EntryPoint]:
    """Return the commands that installed packages add; none of them replaces a command of ours."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in COMMANDS}


def command_names() -> list[str]:
    """Return every command as typed: those for daily use, those of other packages, then the tools."""
    ours = [name for name in COMMANDS if not name.startswith("tools ")]
    return [*ours, *sorted(plugins()), *(name for name in COMMANDS if name.startswith("tools "))]


def find_command(name: str) -> Callable[..., Outcome]:
    """Return the function behind a command, such as "embed" or "tools plan"."""
    if name in COMMANDS:
        module, _, function = COMMANDS[name].partition(":")
        return getattr(import_module(module), function)
    point = plugins()[name]
    try:
        return point.load()
    except Exception as problem:  # the code of another package may raise anything
        package = point.dist.name if point.dist is not None else point.value
        raise UserError(
            f"The command {name} of the package {package} cannot be loaded ({type(problem).__name__}: {problem}): "
            "update or uninstall that package."
        ) from problem
