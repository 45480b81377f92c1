"""A torchvision that was not built for this torch: what adapters, the doctor and the start-up file do about it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from anechoic.adapters import torchvision_operators
from anechoic.errors import UserError
from anechoic.training import doctor

# What a torchvision of another build does: its first operator is unknown to torch.
BROKEN = "import torch\ntorch.library.register_fake('torchvision::nms')(lambda dets, scores, iou_threshold: dets)\n"
# A library that imports it, as timm does.
LIBRARY = "import torchvision\n"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A folder with such a pair."""
    (tmp_path / "torchvision.py").write_text(BROKEN)
    (tmp_path / "timm.py").write_text(LIBRARY)
    return tmp_path


def run(code, folder):
    clean = "import sys; sys.meta_path[:] = [x for x in sys.meta_path if type(x).__name__ != 'DeclareOperators']; "
    start = clean + f"sys.path.insert(0, {str(folder)!r}); "
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)


@pytest.mark.slow
def test_library_that_imports_a_mismatched_torchvision_is_imported(broken):
    assert "torchvision::nms" in run("import timm", broken).stderr  # as it is without us
    code = "from anechoic.adapters.torchvision_operators import import_library; print(import_library('timm').__name__)"
    done = run(code, broken)
    assert done.stdout == "timm\n", done.stderr


@pytest.mark.slow
def test_doctor_names_a_mismatched_torchvision_and_the_command(broken):
    code = "from anechoic.training.doctor import versions; print([x for x in versions() if x.what == 'torchvision'])"
    said = run(code, broken).stdout
    assert "torchvision::nms" in said
    assert torchvision_operators.COMMAND in said


def test_doctor_prints_the_build_of_torch_and_no_mismatch_where_there_is_none(monkeypatch):
    monkeypatch.setattr(doctor, "mismatch", lambda: "")
    found = [finding.what for finding in doctor.versions()]
    assert "torch build" in found
    assert "torchvision" not in found


def test_library_that_fails_otherwise_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision_operators, "mismatch", lambda: "")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_library.py").write_text("raise RuntimeError('no symbol\\nmore')")
    with pytest.raises(UserError, match=r"failing_library cannot be imported \(no symbol\): anechoic tools doctor"):
        torchvision_operators.import_library("failing_library")
    with pytest.raises(
        UserError, match=r'absent_library models need an extra package: pip install "anechoic\[families'
    ):
        torchvision_operators.import_library("absent_library")


@pytest.mark.parametrize("broken", [False, True])
def test_operators_are_declared_at_start_up_only_if_torchvision_cannot_be_imported(broken, tmp_path, monkeypatch):
    module = torchvision_operators
    start = tmp_path / "torchvision_operators.pth"
    start.write_text("from an earlier installation")
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=int(broken)))
    module.install()
    assert start.exists() == broken
