"""The notebooks run from top to bottom at small sizes; in git they have no outputs."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# Replaces the cell tagged "parameters".
SMALL = {
    "own_folder": "folder, run, epochs = 'photos', 'runs/photos', 1\noptions = {'image_size': 32, 'batch_size': 8}",
    "two_alphas": "source, labeled = 'emoji:style=noto', 'emoji:test:style=noto'\n"
    "test = 'emoji:test:style=twemoji'\n"
    "alphas, seeds, samples = (1.0, 0.6), range(1), 128",
    "your_timm_model": "name, options = 'vit_tiny_patch16_224', {'img_size': 32, 'depth': 2, 'num_classes': 10}\n"
    "pretrained, steps, batch = False, 3, 4",
}


@pytest.fixture
def photos(tmp_path):
    random = np.random.default_rng(0)
    for i in range(24):
        folder = tmp_path / "photos" / ("cats" if i % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path


def test_every_notebook_has_parameters():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_notebook_in_git_has_no_outputs(name):
    for cell in json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_notebook_runs(name, photos, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if name == "your_timm_model":
        pytest.importorskip("timm")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = SMALL[name]
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(photos)}})
    client.execute()
    assert all(cell.get("execution_count") for cell in notebook.cells if cell.cell_type == "code")
