"""README and docs: commands parse as on the command line, code runs, links resolve.

A block that needs other hardware, data or weights has a comment before it, `<!-- not run: why -->`; its commands are
parsed. A shell block under `<!-- run -->` is run.
"""

import functools
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tyro
from PIL import Image

import anechoic
from anechoic.cli import command_names, find_command
from anechoic.cli.main import main, split_name, with_json_flag
from anechoic.config import Config, settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMUNITIES = ("microscopy", "satellite", "medical")
LIBRARIES = ("timm", "transformers", "torchvision", "diffusers")
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]*) -->\n)?^(?P<in> *)```(?P<kind>[^\n]*)\n(?P<body>.*?)^(?P=in)```", re.M | re.S
)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def blocks(page, kind):
    """(mark, text, heading above it) of every fenced block of this kind."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        if found["kind"].strip() == kind:
            headings = re.findall(r"^##+ (.*)$", text[: found.start()], flags=re.M)
            yield found["mark"] or "", found["body"], headings[-1] if headings else ""


def shell_lines(body):
    joined = body.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def commands(page):
    return [words for _, body, _ in blocks(page, "bash") for words in shell_lines(body)]


def unique_commands():
    every = {tuple(words): page for page in PAGES for words in commands(page)}
    return {words: page for words, page in every.items() if words[0] == "anechoic"}


# ---- commands


@functools.cache
def parser_of(name):
    """The command as the command line types it, with nothing behind it."""
    typed = with_json_flag(find_command(name))

    def nothing(*args, **kwargs):
        return None

    functools.update_wrapper(nothing, typed)
    del nothing.__wrapped__
    nothing.__signature__ = typed.__signature__
    return nothing


def parse(words):
    name, rest = split_name(words)
    if rest == ["--help"]:
        return
    for end in ("|", ">", "&&"):
        rest = rest[: rest.index(end)] if end in rest else rest
    tyro.cli(parser_of(name), prog=f"anechoic {name}", args=rest)


def test_commands_of_the_pages_parse():
    wrong = []
    for (_, *words), page in unique_commands().items():
        if words[0] in ("--help", "--version"):
            continue
        try:
            parse(words)
        except SystemExit:
            wrong.append(f"{page.name}: anechoic {shlex.join(words)}")
    assert not wrong, "\n".join(wrong)


def test_parser_refuses_what_the_command_line_refuses(capsys):
    for words in (["embed", "runs/mine"], ["evaluate", "runs/mine", "--trian", "x"], ["demo", "--samples", "many"]):
        with pytest.raises(SystemExit):
            parse(words)
    capsys.readouterr()


@pytest.mark.parametrize("name", [name for name in command_names() if name not in ("train", "tools slurm")])
def test_example_of_every_command_parses(name):
    example = " ".join(find_command(name).__doc__.split("Example: ", 1)[1].split("\n\n", 1)[0].split())
    parse(shlex.split(example)[1:])


def test_flags_in_prose_exist():
    """`anechoic COMMAND ... --flag` inside a sentence: the command is there and has the flag."""
    known = {f"--{name.replace('_', '-')}" for name, _ in settings(Config())} | {"--json", "--help", "--dry-run"}
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for code in re.findall(r"`anechoic ([^`]+)`", prose):
            if code.split()[0] in ("COMMAND", "tools", "--help", "--version", "--completion") or "[" in code.split()[0]:
                continue
            name, rest = split_name(code.split())
            own = {f"--{word.replace('_', '-')}" for word in inspect.signature(find_command(name)).parameters}
            flags = [word for word in rest if word.startswith("--") and word != "--"]
            assert set(flags) <= own | known, f"{page.name}: anechoic {code}"


def test_shell_lines_name_existing_targets_and_extras():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for page in PAGES:
        for words in commands(page):
            if words[0] == "make":
                assert set(words[1:]) <= targets, f"{page.name}: {words}"
            elif words[0] == "pip":
                named = {
                    extra for word in words for part in re.findall(r"\[([^\]]+)\]", word) for extra in part.split(",")
                }
                assert named <= extras, f"{page.name}: {words}"
            else:
                assert words[0] in ("anechoic", "python", "python3", "curl"), f"{page.name}: {words}"
    listed = re.search(r"^Extras: ([a-z ]+)\.$", (ROOT / "docs" / "install.md").read_text(), flags=re.M)
    assert listed is not None
    assert set(listed[1].split()) == extras


def test_commands_are_in_shell_blocks():
    """Nothing hides from these tests in a block without a language or in an indented one."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not any("anechoic " in body for _, body, _ in blocks(page, "")), page
        assert not re.search(r"^    (?:\$ )?anechoic ", BLOCK.sub("", text), flags=re.M), page


# ---- code


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what pages speak of: photos in two classes, and two runs of seconds."""
    here = tmp_path_factory.mktemp("docs")
    random = np.random.default_rng(0)
    for i in range(24):
        folder = here / "photos" / ("cats" if i % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    tiny = {"dim": 24, "depth": 2, "num_heads": 2, "decoder_dim": 24, "decoder_depth": 1, "decoder_num_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        anechoic.pretrain("photos", out="runs/photos", image_size=32, epochs=1, batch_size=8, model_options=tiny)
        anechoic.pretrain(
            "digits:train",
            out="runs/digits",
            channels=1,
            epochs=0.05,
            batch_size=32,
            model_options={**tiny, "patch_size": 2},
        )
    return here


def python_sections():
    """(page, heading) -> what runs under it, in order and in one namespace."""
    found = {}
    for page in PAGES:
        for mark, body, heading in blocks(page, "python"):
            if not mark.startswith("not run: "):
                found.setdefault((page.relative_to(ROOT).as_posix(), heading), []).append(body)
    return {place: "\n".join(bodies) for place, bodies in found.items()}


# Networks that are trained for a few steps may have one class token for all images.
UNTRAINED = pytest.mark.filterwarnings("ignore:The features of layer")


@pytest.mark.slow
@UNTRAINED
@pytest.mark.parametrize(("page", "heading"), python_sections())
def test_python_of_the_pages_runs(page, heading, workplace, monkeypatch):
    code = python_sections()[page, heading]
    for library in LIBRARIES:
        if re.search(rf"^(?:import|from) .*\b{library}\b", code, flags=re.MULTILINE):
            pytest.importorskip(library, reason=f"{library} is what this example is about")
    monkeypatch.chdir(workplace)
    exec(compile(code, f"{page}: {heading}", "exec"), {"__name__": "docs"})


def test_every_library_has_an_example():
    shown = [heading for page, heading in python_sections() if page == "docs/your-model.md"]
    for library in (*LIBRARIES, "torch"):
        assert any(library in heading for heading in shown)


RUN = [page for page in PAGES if any(mark == "run" for mark, _, _ in blocks(page, "bash"))]


@pytest.mark.slow
@UNTRAINED
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_marked_shell_blocks_run(page, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    np.savez("bands.npz", images=np.zeros((64, 32, 32, 6), dtype=np.uint8))
    if page.stem in COMMUNITIES:  # their commands read files that their Python makes
        for _, body, _ in blocks(page, "python"):
            exec(compile(body, page.name, "exec"), {"__name__": "docs"})
    for mark, body, _ in blocks(page, "bash"):
        if mark == "run":
            for words in shell_lines(body):
                assert main(words[1:]) == 0, f"{page.name}: {words}"
    capsys.readouterr()


def test_pages_of_the_communities_train_search_and_explore():
    """Not only --dry-run."""
    for name in COMMUNITIES:
        page = ROOT / "docs" / f"{name}.md"
        ran = [words for mark, body, _ in blocks(page, "bash") if mark == "run" for words in shell_lines(body)]
        assert {"pretrain", "search", "explore"} <= {words[1] for words in ran if "--dry-run" not in words}, name


def test_marks_have_a_reason():
    for page in PAGES:
        for kind in ("bash", "python"):
            for mark, _, _ in blocks(page, kind):
                assert mark in ("", "run") or re.fullmatch(r"not run: \w.{5,}", mark), f"{page.name}: {mark!r}"


# ---- links


def test_links_of_the_readme_resolve():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)
    for link in linked:
        assert link.startswith("https://") or (ROOT / link).exists(), link
