"""Find private or British words where the field has a common one: `python tools/words.py [PATH ...]`.

Every finding is a line with the word and what to write instead. Quotations (Markdown lines that begin with `>`) and the
titles of cited works are exempt, and so is a line that a rule's exception matches; an exception sees `PATH: LINE`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# ruff: noqa: E501
ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".md", ".toml", ".yml", ".ipynb", ".js", ".html", ".css", ""}
EXEMPT = (
    "results/",
    "tests/fuzz/corpus/",
    "tests/test_tools.py",
    "tools/words.py",
    "LICENSE",
    "anechoic/data/emoji_sheets/",
    ".git",
)
BRITISH_IZE = (
    "standard|normal|initial|orthogonal|summar|local|minim|maxim|recogn|optim|regular|symmetr|raster|random|serial|organ"
    "|general|vector|quant|real|util|parallel|memor|priorit|penal|neutral|final|visual|character|custom|token|factor"
    "|categor|equal|stabil|synchron"
)
# What is found (between letters, so that snake_case counts) -> what to write; and a line that matches the third is fine.
RULES: tuple[tuple[str, str, str], ...] = (
    (rf"(?:{BRITISH_IZE})is(?:e|ed|es|er|ers|ing|ation|ations)", "American spelling: -ize", ""),
    (r"\w*(?:neighbour|colour|behaviour|favour|honour)\w*", "American spelling: -or", ""),
    (r"centre[ds]?|centring|grey|greyscale|un?labelled|labelled|labelling|judgement|licences?|catalogues?|artefacts?", "American spelling", ""),
    (r"per cent", "percent or %", ""),
    (r"processors?", "CPU", r"image[ _]processor|ImageProcessor|preprocessor|processor_config|\.processor|platform\.processor|\"processor"),
    (r"accelerators?", "GPU", r"MPS|XPU|mps|xpu|torch\.accelerator|accelerators?\(|import .*accelerators"),
    (r"(?:go|goes|going|went|gone) on|carr(?:y|ies|ied) on", "resume, continue", ""),
    (r"shar(?:e|es|ed|ing) out", "shard", ""),
    (r"whoever|somebody else|goodbye|hangs? up", "the parent process, exit", ""),
    (r"tells? of|told", "report, warn", ""),
    (r"lea(?:ve|ves|ving) out|left out", "skip, omit", ""),
    (r"(?:to be|can be|be|cannot be) had|for want of|had from afar|afar", "not found, not available", ""),
    (r"anew|come again|in line again", "again, retry, requeue", ""),
    (r"made to harm|distrust\w*", "malicious, untrusted", ""),
    (r"(?:another|five|other|which|several|many|a|the|each|same|across|two|its|of) hands?|hands", "style (of a drawing)", r"hands? (?:over|to|in)\b|by hand|hand-|-hand|hands-on|\"hands|evidence/hands|names \(hands"),
    (r"twins?", "residual baseline", ""),
    (r"core[- ](?:hours?|minutes?)|(?:minutes?|hours?) of one core", "CPU hours, CPU minutes", ""),
    (r"peak rates?", "peak learning rate", ""),
    (r"(?:at most )?so many", "the number of, a maximum of", ""),
    (r"has seen nothing|have seen nothing", "untrained", ""),
    (r"mends?|mended|mending|wrong before", "fix", ""),
    (r"judg(?:e|es|ed|ing)", "evaluate", ""),
    (r"watch(?:es|ed|ing)?|monitor(?:s|ed|ing)?", "validation, validate", r"\"(?:watch|monitor)\"|--monitor|\bwatch\b.*legacy"),
    (r"keepers?", "checkpointer", ""),
    (r"gives|says|tells", "returns, prints, reports", ""),
    (r"hands? out|handed out|puts? out", "returns", ""),
    (r"verbs?", "command", ""),
    (r"faults?", "defect, bug, failure", r"tests/crash/|fault injection|[Pp]age fault|[Cc]rash|CRASH|inject|[Ss]egmentation fault|segfault"),
)  # fmt: skip
COMPILED = [(re.compile(rf"(?<![A-Za-z])(?:{found})(?![A-Za-z])", re.I), instead, re.compile(fine) if fine else None) for found, instead, fine in RULES]  # fmt: skip


def findings(path: Path) -> list[str]:
    """Return one line of text for every word of the file that has a better one."""
    name = path.relative_to(ROOT)
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if path.suffix == ".md" and line.lstrip().startswith(">"):
            continue
        if path.name == "CHANGELOG.md" and line.startswith("|"):  # the table of old names
            continue
        if "# legacy name" in line:  # a setting or key of older files
            continue
        for rule, instead, fine in COMPILED:
            if fine and fine.search(f"{name}: {line}"):
                continue
            found += [f"{name}:{number}: {match.group()!r}: {instead}" for match in rule.finditer(line)]
    return found


def files(arguments: list[str]) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    chosen = [name for name in listed if not name.startswith(EXEMPT) and Path(name).suffix in SUFFIXES]
    return [ROOT / name for name in chosen if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def main(arguments: list[str]) -> int:
    found = [line for path in files(arguments) for line in findings(path)]
    print("\n".join([*found, f"{len(found)} words to replace"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
