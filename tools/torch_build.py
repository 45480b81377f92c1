"""Print which build of torch is installed, in one line, and fail unless it is the one asked for: cpu, cuda or as-is.

python tools/torch_build.py cpu
"""

from __future__ import annotations

import sys

REMEDY = (
    "choose a build with PyTorch's own selector (pytorch.org, Get Started), then: rm -rf .venv, and "
    "make TORCH={asked} TORCH_INDEX=ADDRESS with the address after --index-url in the command it prints."
)


def build_of(cuda: str | None, hip: str | None) -> str:
    return f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"


def verdict(asked: str, version: str, build: str) -> tuple[int, str]:
    """Return the exit code and the line to print."""
    if asked not in ("cpu", "cuda", "as-is"):
        return 2, f"TORCH={asked} is unknown: write TORCH=cpu, TORCH=cuda or TORCH=as-is."
    line = f"torch {version}: {build} build."
    if asked == "as-is" or build.lower().startswith(asked):
        return 0, line
    return 1, f"{line} TORCH={asked} was asked for: {REMEDY.format(asked=asked)}"


def main(asked: str) -> int:
    import torch

    code, line = verdict(asked, torch.__version__, build_of(torch.version.cuda, torch.version.hip))
    print(line, file=sys.stderr if code else sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "as-is"))
