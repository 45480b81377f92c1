"""Let torchvision be imported beside a torch it was not built for, such as a CPU build of torch.

Its compiled operators then fail to load, and its import stops at the first one it decorates. `make install` runs this
file: if torchvision cannot be imported, the module is added to the start-up of the virtual environment and declares
those operators just before torchvision is imported. A matching pair of builds is left alone: declaring its operators
twice aborts the interpreter. Development only; the package does not use it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from pathlib import Path

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
libraries = []  # torch drops a declaration when its Library object is collected


class DeclareOperators(MetaPathFinder):
    """Declare the operators when torchvision is about to be found; find nothing itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for signature in SIGNATURES:
            if not hasattr(torch.ops.torchvision, signature.partition("(")[0]):
                library.define(signature)
        libraries.append(library)


def install() -> None:
    """Load the finder at the start of every interpreter of this environment if torchvision cannot be imported."""
    folder = Path(sysconfig.get_paths()["purelib"])
    start = folder / "torchvision_operators.pth"
    start.unlink(missing_ok=True)
    if subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode:
        shutil.copy(__file__, folder / Path(__file__).name)
        start.write_text("import torchvision_operators\n")


if __name__ == "__main__":
    install()
else:
    sys.meta_path.insert(0, DeclareOperators())
