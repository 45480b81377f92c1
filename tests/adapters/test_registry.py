"""The registry of foreign libraries: a library is one row and one file, which never imports the library itself."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from anechoic import decay, fold, shortcuts
from anechoic.adapters import blocks
from anechoic.adapters.registry import ADAPTERS, Adapter
from anechoic.errors import UserError
from anechoic.eval.encoders import open_encoder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LIBRARY = """
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + self.linear(self.norm(x))

class Net(nn.Module):
    def __init__(self, dim=8, depth=3):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, stride=4)
        self.blocks, self.norm = nn.Sequential(*[Block(dim) for _ in range(depth)]), nn.LayerNorm(dim)

    def forward(self, images):
        return self.norm(self.blocks(self.embed(images).flatten(2).transpose(1, 2)))
"""
ADAPTER = """
from anechoic.adapters.blocks import DecayedBlock, describe, pre_norm, replaces, stream_to
from anechoic.adapters.registry import ForeignEncoder
from anechoic.data.preprocess import Preprocess

@replaces("fakelib.Block")
class FakeBlock(DecayedBlock):
    kinds = ("mlp",)
    parts = "norm linear"

    def forward(self, x):
        return self.shortcut1(x, self.linear(self.norm(x)))

    def branches(self):
        return pre_norm(self, (self.norm, self.linear))

describe("fakelib.Net", lambda model: stream_to(model.blocks, model.norm))

def open_encoder(name):
    import fakelib

    def make():
        model = fakelib.Net(depth=int(name)).eval()
        model.num_prefix_tokens = 0
        return model

    return ForeignEncoder(f"fakelib:{name}", make(), Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3), make)
"""


def test_new_library_is_one_file_and_one_row(tmp_path, monkeypatch):
    (tmp_path / "fakelib.py").write_text(LIBRARY)
    (tmp_path / "fakelib_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    row = Adapter("fakelib", "fakelib_adapter", blocks="fakelib Net", encoder="fakelib:DEPTH")
    monkeypatch.setitem(ADAPTERS, "fakelib", row)
    encoder = open_encoder("fakelib:4")
    images = torch.randn(2, 3, 16, 16)
    assert encoder.widths == [8] * 6  # the embedding, four blocks, the norm
    decayed = decay(encoder.model, 0.5)
    assert [row.alpha for row in shortcuts(decayed)] == pytest.approx([1, 5 / 6, 2 / 3, 1 / 2])
    folded = fold(decayed)
    assert type(folded.blocks[0]) is type(encoder.model.blocks[0])
    torch.testing.assert_close(folded(images), decayed(images), atol=1e-5, rtol=1e-5)
    assert (decayed(images) - encoder.model(images)).abs().max() > 1e-3
    with pytest.raises(UserError, match="fakelib Net"):
        decay(torch.nn.Linear(3, 3))


@pytest.mark.slow
def test_no_adapter_imports_its_library():
    code = "from anechoic.adapters.registry import ADAPTERS\nimport sys\n"
    code += "for adapter in ADAPTERS.values():\n    adapter.load()\n"
    code += "print([name for name in ('timm', 'transformers', 'torchvision', 'diffusers') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("library", [name for name, adapter in ADAPTERS.items() if adapter.blocks])
def test_registered_classes_exist(library):
    """A path with a typing error, or one that a new version moved, would silently match nothing."""
    pytest.importorskip(library, reason=f"{library} is what this test is about")
    ADAPTERS[library].load()
    tables = (blocks._decayed, blocks._streams, blocks._kept_plain, blocks._refusals, blocks._preparations)
    paths = {kind for table in tables for kind in table if isinstance(kind, str)}
    for path in sorted(path for path in paths if path.startswith(f"{library}.")):
        module, _, name = path.rpartition(".")
        assert blocks.class_path(getattr(import_module(module), name)) == path


def test_refused_code_leaves_the_verbosity_of_transformers_alone(tmp_path):
    logging = pytest.importorskip("transformers.utils.logging", reason="transformers is what this test is about")
    (tmp_path / "config.json").write_text('{"model_type": "vit", "auto_map": {"AutoModel": "evil.Model"}}')
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        with pytest.raises(UserError, match="asks for code of its own to be run"):
            open_encoder(f"transformers:{tmp_path}")
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


def test_open_encoder_refuses_the_prefix_of_data_sets():
    with pytest.raises(UserError, match=r"hf: names data sets\. For a model write transformers:some/folder\."):
        open_encoder(f"hf:{Path('some') / 'folder'}")
