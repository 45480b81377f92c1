"""Lets torchvision be imported beside a torch it was not built for, such as the CPU build that constraints.txt pins.

Its compiled operators then fail to load, and its import stops at the first one it decorates. `make install` puts this
module into the virtual environment's start-up, where it declares those operators just before torchvision is imported.
Development only: nothing in the package knows of it, and a matching pair of builds never needs it.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from importlib.abc import MetaPathFinder
from pathlib import Path

SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
libraries = []  # torch forgets a declaration when its Library object is collected


class DeclareOperators(MetaPathFinder):
    """Finds nothing itself: it only acts when torchvision is about to be looked up, once."""

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
    """Copy this module into the running environment and have every interpreter of it load the finder at its start."""
    folder = Path(sysconfig.get_paths()["purelib"])
    shutil.copy(__file__, folder / Path(__file__).name)
    (folder / "torchvision_operators.pth").write_text("import torchvision_operators\n")


if __name__ == "__main__":
    install()
else:
    sys.meta_path.insert(0, DeclareOperators())
