"""Let torchvision be imported beside a torch it was not built for, such as a CPU build of torch.

Its compiled operators then fail to load, and its import stops at the first one it decorates ("operator torchvision::nms
does not exist"), with it those of timm, transformers and diffusers. `import_library` declares the operators and tries
again. For programs that import such a library themselves, `python -m anechoic.adapters.torchvision_operators` adds this
file to the start-up of the virtual environment. A matching pair of builds is left alone: declaring its operators twice
aborts the interpreter.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
COMMAND = "python -m anechoic.adapters.torchvision_operators"
libraries: list[Any] = []  # torch drops a declaration when its Library object is collected


def declare() -> None:
    """Declare the operators that torch does not know yet."""
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for signature in SIGNATURES:
        if not hasattr(torch.ops.torchvision, signature.partition("(")[0]):
            library.define(signature)
    libraries.append(library)


class DeclareOperators(MetaPathFinder):
    """Declare the operators when torchvision is about to be found; find nothing itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare()


def mismatch() -> str:
    """Return why torchvision cannot be imported beside this torch; empty if it can, or is not installed."""
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return ""
    try:
        import_module("torchvision")
    except Exception as problem:
        return str(problem).strip().splitlines()[0]
    return ""


def allow_mismatch() -> None:
    """Let libraries that import torchvision be imported, of whatever build it is."""
    if mismatch():
        declare()


def import_library(name: str, *, extra: str = "families") -> Any:
    """Return the library, which may import torchvision, of whatever build. UserError if it cannot be imported."""
    from anechoic.errors import UserError

    allow_mismatch()
    try:
        return import_module(name)
    except Exception as problem:
        if isinstance(problem, ModuleNotFoundError) and problem.name == name:
            raise UserError(f'{name} models need an extra package: pip install "anechoic[{extra}]".') from problem
        reason = str(problem).strip().splitlines()[0]
        raise UserError(f"{name} cannot be imported ({reason}): anechoic tools doctor names the cause.") from problem


def install() -> None:
    """Load the finder at the start of every interpreter of this environment if torchvision cannot be imported."""
    folder = Path(sysconfig.get_paths()["purelib"])
    start = folder / "torchvision_operators.pth"
    start.unlink(missing_ok=True)
    if find_spec("torchvision") is None:
        print("torchvision is not installed.")
    elif subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode:
        shutil.copy(__file__, folder / start.with_suffix(".py").name)
        start.write_text("import torchvision_operators\n")
        print(f"torchvision does not match torch: its missing operators are declared at start-up ({start}).")
    else:
        print("torchvision matches torch.")


if __name__ == "__main__":
    install()
elif __name__ == "torchvision_operators":  # the copy that start-up loads
    sys.meta_path.insert(0, DeclareOperators())
