"""What the site has beyond docs/: the README as its first page, the reference from the code, and no foreign host.

mkdocs calls the functions that begin with on_. The reference is written from signatures and docstrings whenever the
site is built, so it cannot fall behind the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import docstring_parser

ROOT = Path(__file__).resolve().parents[1]
# Files of the project that pages link to -> where they are on the site.
BESIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "CITATION.cff": "citation.txt"}
# Our own stand-in for the script that the theme's offline search would fetch from a foreign host.
FOREIGN_SCRIPT = re.compile(r'<script src="https://unpkg\.com/[^"]*"></script>')


# ---- the site


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, and the records that pages cite."""
    from mkdocs.structure.files import File

    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    for path, source in cited(Path(config.docs_dir)).items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ lead to the same file on the site."""
    up = "../" * page.file.src_uri.count("/")
    for name, place in BESIDE.items():
        markdown = markdown.replace(f"]({up}../{name})", f"]({up}{place})")
    return markdown.replace(f"]({up}../results/", f"]({up}results/")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    return FOREIGN_SCRIPT.sub(f'<script src="{up}assets/worker.js"></script>', output)


def on_post_template(output: str, **_: Any) -> str:
    return FOREIGN_SCRIPT.sub("", output)


def made_pages() -> dict[str, str]:
    return {
        "index.md": home(),
        "contributing.md": relinked((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "citation.txt": (ROOT / "CITATION.cff").read_text(encoding="utf-8"),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
        "reference/settings.md": settings_page(),
        "reference/recipes.md": recipes_page(),
    }


def cited(docs: Path) -> dict[str, Path]:
    """Place on the site -> file, for the records and notebooks that pages link to."""
    texts = [path.read_text(encoding="utf-8") for path in docs.rglob("*.md")]
    names = {name for text in texts for name in re.findall(r"\]\((?:\.\./)+(results/[^)#]+)\)", text)}
    names |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")}
    return {name: ROOT / name for name in sorted(names)}


def home() -> str:
    """The README, whose links start one folder higher."""
    return relinked((ROOT / "README.md").read_text(encoding="utf-8"))


def relinked(text: str) -> str:
    text = re.sub(r"(\]\(|src=\"|href=\")docs/", r"\1", text)
    for name, place in BESIDE.items():
        text = re.sub(rf"\]\({re.escape(name)}(?=[)#])", f"]({place}", text)
    return text


# ---- the reference


def commands_page() -> str:
    from anechoic.cli import command_names

    parts = [
        "# Commands",
        "",
        "Each is a command, `anechoic COMMAND`, and a Python function, `anechoic.COMMAND(...)`, with the same "
        "arguments; `-` is `_` in Python. Every command also takes `--json` and `--help`.",
        "",
    ]
    for name in command_names():
        parts += command_section(name)
    return "\n".join(parts) + "\n"


def command_section(name: str) -> Iterator[str]:
    from anechoic.cli import find_command

    function = find_command(name)
    parsed = docstring_parser.parse(inspect.getdoc(function) or "")
    body = "\n\n".join(text for text in (parsed.short_description, parsed.long_description) if text)
    words, _, example = body.partition("Example: ")
    yield f"## {name}\n"
    yield f"{words.strip()}\n"
    yield f"```bash\n{' '.join(example.split())}\n```\n"
    rows = list(argument_rows(function, {one.arg_name: one.description or "" for one in parsed.params}))
    if rows:
        yield "| argument | default | |\n|---|---|---|"
        yield from rows
        yield ""


def argument_rows(function: Any, descriptions: dict[str, str]) -> Iterator[str]:
    hints = inspect.get_annotations(function, eval_str=True)
    for parameter in inspect.signature(function).parameters.values():
        given = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        shown = f"--{parameter.name.replace('_', '-')}" if given else parameter.name.upper()
        required = parameter.default is inspect.Parameter.empty
        shared = next((mark.help for mark in get_args(hints[parameter.name])[1:] if getattr(mark, "help", None)), "")
        text = descriptions.get(parameter.name) or shared
        yield row(f"`{shown}`", "required" if required else default(parameter.default), text)


def default(value: Any) -> str:
    if value is None or value in ("", (), {}):
        return ""
    if isinstance(value, tuple | list):
        return f"`{' '.join(map(str, value))}`"
    return f"`{value}`" if not isinstance(value, bool) else ("yes" if value else "no")


def row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def python_page() -> str:
    import anechoic

    names = sorted(
        (name for name, module in anechoic._MODULE_OF.items() if not module.startswith("cli.")), key=str.lower
    )
    parts = [
        "# Python",
        "",
        "Everything here is an attribute of `anechoic` and loads on first use. The [commands](commands.md) are "
        "functions of it too, and return an `Outcome` with `config`, `metrics`, `seed`, `seconds` and `text`.",
        "",
    ]
    for name in names:
        parts += entry(name, getattr(anechoic, name))
    return "\n".join(parts) + "\n"


def entry(name: str, thing: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"```python\n{signature(name, thing)}\n```\n"
    yield f"{prose(thing)}\n"
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                yield f"**`{signature(method, function)}`**\n\n{prose(function)}\n"


def signature(name: str, thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except ValueError:  # some classes written in C, and exceptions
        found = "(...)"
    found = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", found)
    text = name + re.sub(r"(?<=[:>\[,] )?'([A-Za-z_][^']*)'", r"\1", found)
    return text if len(text) < 100 else re.sub(r", (?=\w+:|\*)", ",\n    ", text)


def prose(thing: Any) -> str:
    """A docstring as Markdown: its indented lines are formulas or code."""
    return inspect.getdoc(thing) or ""


def settings_page() -> str:
    from anechoic.config import Config

    parts = [
        "# Settings",
        "",
        "The settings of a run, as `anechoic train RECIPE --SETTING VALUE` takes them and `config.json` keeps them. "
        "Recipes set their own values; those below are the defaults behind them.",
        "",
        "| setting | default | |",
        "|---|---|---|",
        *setting_rows(Config, ""),
    ]
    return "\n".join(parts) + "\n"


def setting_rows(section: type, prefix: str) -> Iterator[str]:
    texts = field_words(section)
    for one in dataclasses.fields(section):
        made = one.default_factory
        value = made() if made is not dataclasses.MISSING else one.default
        if dataclasses.is_dataclass(value):
            yield from setting_rows(type(value), f"{prefix}{one.name}.")
        else:
            yield row(f"`{prefix}{one.name.replace('_', '-')}`", default(value), texts.get(one.name, ""))


def field_words(section: type) -> dict[str, str]:
    """The string below each field, as tyro reads it for --help."""
    found = re.findall(r"^    (\w+): [^\n]*\n    \"\"\"(.*?)\"\"\"", inspect.getsource(section), flags=re.M | re.S)
    return dict(found)


def recipes_page() -> str:
    from anechoic.recipes import table

    parts = ["# Recipes", "", "What `anechoic train` can be given by name; any setting can be overridden.", ""]
    for name, function in table().items():
        words = inspect.getdoc(function) or ""
        head, _, rest = words.partition("\n")
        parts += [f"## {name}\n", f"{head}\n", *recipe_facts(rest)]
    return "\n".join(parts) + "\n"


def recipe_facts(text: str) -> Iterator[str]:
    """Command, Cost and Expect as they stand in the docstring."""
    for key, words in re.findall(r"^(\w+): (.*?)(?=^\w+: |\Z)", text.strip() + "\n", flags=re.M | re.S):
        joined = " ".join(words.split())
        yield f"```bash\n{joined}\n```\n" if key == "Command" else f"**{key}.** {joined}\n"
