"""Mistakes of new users, each answered with one sentence that names the remedy."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from dataclasses import is_dataclass

import numpy as np
import pytest
from PIL import Image
from zoo import make

import anechoic
from anechoic.cli.main import Messages, flags_of, main
from anechoic.config import Config, OptimConfig, SaveConfig
from anechoic.config.checking import descriptions, hints
from anechoic.data import decoding, open_source
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.runtime.checkpoint import model_card, write_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model = make("vit")
    folder = tmp_path_factory.mktemp("sentences") / "runs" / "mesh"
    return write_model(folder, model.state_dict(), model_card(model, Preprocess((0.5,) * 3, (0.5,) * 3, 16, 3)))


def sentence(capsys, *words):
    assert main([str(word) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_wrong_types_are_refused():
    with pytest.raises(UserError, match="depth must be a whole number, not '12'"):
        anechoic.build_model("vit_tiny_patch4", depth="12")
    with pytest.raises(UserError, match=r"decay takes a network .*anechoic.build_model\('vit_tiny'\)"):
        anechoic.decay("vit_tiny")
    with pytest.raises(UserError, match="not 'attn'; did you mean attention"):
        anechoic.decay(make("vit"), only="attn")
    with pytest.raises(UserError, match=r"alpha_min is a number from 0 to 1 or 'auto', not '0\.6'"):
        anechoic.decay(make("vit"), alpha_min="0.6")
    assert anechoic.build_model("vit_tiny_patch4", dim=48, depth=np.int64(2), num_heads=3).config.depth == 2


def test_load_of_an_exported_folder_names_the_import_command(run, tmp_path):
    import torch

    from anechoic.weights.exporting import TARGETS

    model = anechoic.load(run)
    images = torch.randn(2, 3, 16, 16)
    TARGETS["timm"](model, tmp_path / "timm", images)
    with pytest.raises(UserError, match=r"written for timm.*anechoic import "):
        anechoic.load(tmp_path / "timm")
    TARGETS["torch-export"](model, tmp_path / "pt2", images)
    with pytest.raises(UserError, match=r"holds model\.pt2, for other programs: load the run"):
        anechoic.load(tmp_path / "pt2")


def test_misspelt_run_names_the_nearest(run):
    with pytest.raises(UserError, match=r"no run or model directory .*mess; did you mean .*mesh\?"):
        anechoic.load(run.parent / "mess")


def test_swapped_run_and_data_are_refused(run, tmp_path, capsys):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    for words in (["embed", tmp_path, run, "-o", tmp_path / "v.npz"], ["search", tmp_path, run, "0"]):
        assert "give the model first, then the images" in sentence(capsys, *words)


def test_option_of_another_command_is_named(capsys, tmp_path):
    assert "embed has no --temperature, which is an option of evaluate" in sentence(
        capsys, "embed", "a", "--temperature", "3"
    )
    assert "pretrain has no --optim.lr; here it is --lr" in sentence(capsys, "pretrain", "digits", "--optim.lr", "1e-3")
    found = sentence(capsys, "train", "pocket_mae_digits", "--alpha-min", "0.5")
    assert "train has no --alpha-min; here it is --shortcut.alpha-min" in found
    assert "--shortcut.alpha-min" in flags_of("train")


def test_misspelt_option_or_recipe_names_the_nearest(capsys):
    assert "search has no --enigne; did you mean --engine?" in sentence(
        capsys, "search", "a", "b", "0", "--enigne", "x"
    )
    words = ["train", "pocket_mae_digits"]
    assert "train has no --optim.lrr; did you mean --optim.lr?" in sentence(capsys, *words, "--optim.lrr", "1")
    assert "no recipe 'pocket_mae_digit'; did you mean pocket_mae_digits?" in sentence(capsys, "train", words[1][:-1])


def test_setting_is_turned_off_by_no_option(capsys):
    assert main(["train", "pocket_mae_digits", "--data.no-flip", "--no-compile", "--no-json", "--dry-run"]) == 0
    assert '"flip": false' in capsys.readouterr().out


def test_help_describes_every_setting(capsys):
    with pytest.raises(SystemExit):
        main(["train", "pocket_mae_digits", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for section in (Config, OptimConfig, SaveConfig):
        texts = descriptions(section)
        assert set(texts) >= {name for name, hint in hints(section).items() if not is_dataclass(hint)}
        assert all(sentence in text for sentence in texts.values())


def test_frechet_refuses_a_single_image(tmp_path, capsys):
    Image.new("RGB", (64, 64)).save(tmp_path / "sheet.png")
    words = ["frechet", tmp_path / "sheet.png", "digits:test", "--extractor", "digits"]
    assert "is a single image, and distributions are compared" in sentence(capsys, *words)


def test_dry_run_reports_missing_data(tmp_path, capsys):
    words = ["reproduce", "table2", "--data-root", tmp_path / "missing", "--dry-run"]
    assert "There is no folder" in sentence(capsys, *words)


@pytest.mark.parametrize("words", [["--help"], ["pretrain", "--help"]])
def test_closed_pipe_ends_quietly(words):
    script = f"import sys; sys.argv[1:] = {words}; from anechoic.cli.main import main; sys.exit(main())"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert error == b""
    assert process.returncode == 141


def test_help_marks_optional_arguments(capsys):
    for words in (["train", "pocket_mae_digits"], ["embed"], ["evaluate"], ["pretrain"], ["search"]):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        text = capsys.readouterr().out
        assert "None" not in text
    assert "usage: anechoic search [-h] [OPTIONS] RUN DATA QUERY ..." in text


def test_message_starts_a_new_line_beside_a_progress_bar(monkeypatch):
    """Beside a bar that is being drawn."""
    from tqdm import tqdm

    from anechoic.cli.main import print_message

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm(total=10, file=screen, mininterval=0, disable=False) as bar:
        bar.update(3)
        print_message("anechoic: something is wrong")
    before, _, after = screen.getvalue().partition("anechoic: something is wrong")
    assert before.endswith("\r")
    assert after.startswith("\n")


def test_list_recipes_prints_a_table_or_one_recipe(capsys):
    assert main(["list", "recipes", "--filter", "pocket_mae"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["recipe", "trains", "cost", "expect"]
    assert any(line.startswith("pocket_mae_digits ") for line in lines)
    assert all(len(line) < 220 for line in lines)
    assert main(["list", "recipes", "pocket_mae_digits", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found["settings"]["model"]["name"].startswith("mae_")
    assert "did you mean pocket_mae_digits" in sentence(capsys, "list", "recipes", "pocket_mae_digit")


# ---- formats


def saved(kind, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels).resize((24, 16), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return np.asarray(picture), file.getvalue()


@pytest.mark.parametrize(("kind", "suffix"), [("GIF", "gif"), ("AVIF", "avif")])
def test_gif_and_avif_are_read(kind, suffix, tmp_path):
    if kind not in decoding.FORMATS:
        pytest.skip("this Pillow reads no AVIF: pip install --upgrade pillow")
    pixels, data = saved(kind)
    (tmp_path / f"a.{suffix}").write_bytes(data)
    source = open_source(tmp_path)
    found = source.read(0).permute(1, 2, 0).numpy()
    assert np.abs(found.astype(int) - pixels).mean() < 12


def test_unwritable_path_is_named(run, tmp_path, capsys):
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "file").write_text("no folder")
    error = sentence(capsys, "embed", run, tmp_path / "a.png", "-o", tmp_path / "file" / "v.npz")
    assert str(tmp_path / "file") in error
    assert "another" in error


def heic():
    plugin = pytest.importorskip("pillow_heif", reason="no HEIC here: pip install 'anechoic[heic]'")
    plugin.register_heif_opener()
    return saved("HEIF")


def test_heic_is_read_with_its_extra(tmp_path):
    pixels, data = heic()
    (tmp_path / "a.heic").write_bytes(data)
    found = open_source(tmp_path).read(0).permute(1, 2, 0).numpy()
    assert np.abs(found.astype(int) - pixels).mean() < 12


def test_missing_heic_support_names_the_extra(tmp_path, monkeypatch, caplog):
    _, data = heic()
    monkeypatch.setattr(decoding, "HAS_HEIC", False)
    with pytest.raises(decoding.Undecodable, match=r"anechoic\[heic\]"):
        decoding.decode(data)
    monkeypatch.setattr("anechoic.data.source.IMAGE_SUFFIXES", (".png",))
    remedies = {".heic": decoding.HEIC_REMEDY}
    monkeypatch.setattr("anechoic.data.source.IGNORED_SUFFIXES", remedies)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "b.heic").write_bytes(data)
    for _ in range(2):  # every time
        caplog.clear()
        assert len(open_source(tmp_path)) == 1
        assert "1 image in" in caplog.text
        assert 'b.heic: HEIC needs an extra package: pip install "anechoic[heic]"' in caplog.text


def test_a_message_that_repeats_the_last_is_printed_once(capsys):
    log, handler = logging.Logger("any"), Messages()
    log.addHandler(handler)
    for message in ("2 images not read.", "2 images not read.", "another", "2 images not read."):
        log.warning("%s", message)
    printed = ["anechoic: 2 images not read.", "anechoic: another", "anechoic: 2 images not read."]
    assert capsys.readouterr().err.splitlines() == printed


def test_postscript_is_not_read():
    assert not {"EPS", "WMF"} & set(decoding.FORMATS)
    with pytest.raises(decoding.Undecodable):
        decoding.decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")


# ---- sweeps


def test_sweep_fixes_and_varies_settings(tmp_path, capsys):
    words = ["sweep", "pocket_mae_digits", "--vary", "shortcut.alpha_min", "0.6", "1.0", "--out", str(tmp_path)]
    assert main([*words, "--fix", "optim.samples", "1280", "--fix", "optim.batch_size", "64", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.count(" 1,280 ") == 2
    assert main([*words, "--vary", "optim.epochs", "1", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.count(" 1,280 ") == 2
    error = sentence(capsys, *words, "--fix", "shortcut.alpha_min", "0.7", "--dry-run")
    assert "shortcut.alpha_min is both fixed and varied" in error
    assert "There is no setting optim.smaples" in sentence(capsys, *words, "--fix", "optim.smaples", "7", "--dry-run")


def test_sweep_reports_progress_to_a_file_at_intervals(monkeypatch, tmp_path):
    from anechoic.recipes import recipe
    from anechoic.sweeps import sweep
    from anechoic.sweeps.trial import Trial

    trial = Trial("alpha0.6-seed0", "alpha0.6", recipe("pocket_mae_digits"))
    out = io.StringIO()
    folders = sweep.Folders(tmp_path, tmp_path, tmp_path)
    table = sweep.Table([trial], folders, sweep.Progress(), out, estimates={trial.name: 600.0}, jobs=1)
    job = sweep.Job(trial, None, 0, 0.0)
    table.draw([job])
    assert out.getvalue() == ""
    monkeypatch.setattr(sweep, "REPORT_EVERY", 0.0)
    table.draw([job])
    assert out.getvalue() == "0 of 1  running alpha0.6-seed0 0 %; about 10 min left\n"
