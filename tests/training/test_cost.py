"""plan against known and measured costs, doctor against real damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from damage import flip_a_bit
from tiny_runs import cost_config

from anechoic.cli.main import main
from anechoic.cli.tools.plan import budget_of
from anechoic.errors import UserError
from anechoic.recipes import recipe
from anechoic.training.build import make_model, make_optimizer
from anechoic.training.cost import DEVICES, memory_by_part, passes_of, plan

IN100, IN1K = 800 * 126_689, 800 * 1_281_167


@pytest.fixture(scope="module")
def mae():
    return passes_of(recipe("mae_in100"))


# ---- plan


def test_the_paper_s_hours_are_found_from_its_hardware(mae) -> None:
    """4 x A40: about 20 hours for ImageNet-100 and 200 for ImageNet-1K."""
    for name, samples, hours in (("mae_in100", IN100, 20), ("mae_in1k", IN1K, 200)):
        found = plan(recipe(name), mae, gpus=4, device=DEVICES["a40"], samples=samples)
        assert found.parameters == 117_038_848
        assert found.fits
        assert found.hours == pytest.approx(hours, rel=0.25)


@pytest.mark.slow
def test_operations_equal_the_formulas(mae) -> None:
    """Counted on tensors without content, against the products written down for the plain algorithm."""
    from anechoic.models import model_config
    from anechoic.training.cost import step_flops

    config = model_config("mae_base_patch16", alpha_min=0.6)
    formula = step_flops(config, 1)
    # The network embeds only visible patches and predicts only hidden ones, so it has fewer.
    assert 0.9 * formula < mae.flops_per_sample < formula
    # SiT-XL/2: 118.6 billion multiply-adds forwards, by its authors, without the skips.
    plain = recipe("sit_xl_in1k_latent")
    plain = replace(plain, model=replace(plain.model, options={**plain.model.options, "skips": False}))
    plain = replace(plain, shortcut=replace(plain.shortcut, alpha_min=1.0))
    assert passes_of(plain).flops_per_sample == pytest.approx(3 * 2 * 118.6e9, rel=0.02)


def test_operations_equal_those_counted_in_a_real_step() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from anechoic.models import build_model
    from anechoic.training.build import model_options

    config = cost_config()
    model = build_model(config.model.name, **model_options(config)).train()
    images = torch.randn(8, config.data.channels, config.data.image_size, config.data.image_size)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        from anechoic.models.layers import set_block_options

        set_block_options(model, fused=False)
        model(images).loss.backward()
    # Attention backwards by its formula has five products, the plain algorithm four.
    assert passes_of(config).flops_per_sample * 8 == pytest.approx(counter.get_total_flops(), rel=0.03)


MEASURE = """
import pathlib, sys, torch
sys.path.insert(0, {here!r})
from tiny_runs import cost_config
from anechoic.models.layers import set_block_options
from anechoic.training.build import make_model
config = cost_config()
batch = {batch}
model = make_model(config).train()
set_block_options(model, fused=False)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
def peak():
    # Not ru_maxrss, which starts at what the parent had.
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])
def step(count):
    images = torch.randn(count, config.data.channels, config.data.image_size, config.data.image_size)
    loss = model(images).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()
step(1)
before = peak()
step(batch)
print((peak() - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_is_near_what_a_real_step_takes() -> None:
    batch = 192
    code = MEASURE.format(here=str(Path(__file__).parents[1]), batch=batch)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    measured = float(done.stdout.split()[-1])
    config = cost_config()
    parts = memory_by_part(config, passes_of(config), batch, gpus=1, fsdp=False)
    planned = parts["activations"] + parts["images"]
    # The backward pass holds gradients of activations too, and the allocator rounds up.
    assert planned == pytest.approx(measured, rel=0.25)


def test_laws_of_memory_and_time(mae) -> None:
    config, device = recipe("mae_in100"), DEVICES["a100"]

    def parts(change=lambda config: config, **options):
        return memory_by_part(change(config), mae, 64, **{"gpus": 8, "fsdp": False, **options})

    whole, sharded = parts(), parts(fsdp=True)
    for name in ("weights", "gradients", "optimizer"):
        assert sharded[name] == pytest.approx(whole[name] / 8)
    assert whole["weights"] == 4 * 117_038_848
    assert parts(lambda c: replace(c, recompute=True))["activations"] < 0.4 * whole["activations"]
    averaged = parts(lambda c: replace(c, optim=replace(c.optim, ema=0.999)))
    assert averaged["EMA"] == whole["weights"]
    hours = [plan(config, mae, gpus=n, device=device, samples=IN100).hours for n in (1, 2, 4, 8)]
    assert hours == sorted(hours, reverse=True)
    slow = plan(config, mae, gpus=8, device=device, samples=IN100, images_per_second=100)
    assert slow.bound == "decoding images"
    assert slow.hours == pytest.approx(IN100 / 100 / 3600)


def test_memory_of_muon_has_one_momentum_for_the_matrices_it_updates() -> None:
    """Compared with the state that both optimizers really make."""
    config = cost_config()
    passes = passes_of(config)
    model = make_model(config)
    for algorithm in ("adamw", "muon"):
        chosen = replace(config, optim=replace(config.optim, algorithm=algorithm))
        optimizer = make_optimizer(model, chosen.optim)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        state = (value for values in optimizer.state.values() for value in values.values())
        expected = sum(value.numel() * value.element_size() for value in state if value.ndim)
        assert memory_by_part(chosen, passes, 4, gpus=1, fsdp=False)["optimizer"] == expected


@pytest.mark.slow
def test_plan_command(capsys) -> None:
    assert main(["tools", "plan", "mae_in100", "--gpus", "4", "--gpu", "t4", "--batch-size", "4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["fits"] is False
    assert main(["tools", "plan", "pocket_mae_digits", "--gpus", "3", "--batch-size", "64"]) == 2
    assert "number of --images" in capsys.readouterr().err
    assert main(["tools", "plan", "pocket_mae_digits", "--gpus", "3", "--batch-size", "64", "--images", "1437"]) == 2
    assert "cannot be shared by 3 devices" in capsys.readouterr().err
    assert main(["tools", "plan", "mae_in100", "--gpus", "4", "--gpu", "t4", "--batch-size", "4096"]) == 0
    assert "--accumulate" in capsys.readouterr().out
    assert main(["tools", "plan", "mae_in_100"]) == 2


def test_an_epoch_of_latents_is_of_images_and_mirror_images():
    """700 passes over twice ImageNet's images are the 1400 epochs that the recipe's docstring names."""
    config = recipe("sit_xl_in1k_latent")
    assert budget_of(config, "sit_xl_in1k_latent", None) == 1400 * 1_281_167
    assert budget_of(config, "sit_xl_in1k_latent", 1000) == 1400 * 1000
    assert budget_of(recipe("mae_in1k"), "mae_in1k", 1000) == 800 * 1000


# ---- doctor


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    from anechoic.training.loop import fit

    config = recipe("pocket_mae_digits")
    config = replace(
        config,
        data=replace(config.data, source="digits:train"),
        model=replace(config.model, options={**config.model.options, "dim": 16, "depth": 2, "num_heads": 2}),
        optim=replace(config.optim, samples=512, epochs=None, batch_size=64),
    )
    out = tmp_path_factory.mktemp("doctor") / "run"
    fit(config, out)
    return out


def findings(capsys, *arguments) -> dict:
    capsys.readouterr()
    assert main(["tools", "doctor", *map(str, arguments), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    return {item["what"]: item for item in found["findings"]}


def test_a_healthy_machine_and_run(run: Path, capsys) -> None:
    found = findings(capsys, run)
    assert found["versions"]["state"] == "ok"
    for what in ("weights", "metrics", "checkpoints", "data", "state"):
        assert found[what]["state"] == "ok", found[what]
    assert main(["tools", "doctor"]) == 0
    assert "checks." in capsys.readouterr().out
    assert main(["tools", "doctor", str(run / "absent")]) == 2


def copy_of(run: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(run, folder / "copy"))


def test_damage_is_found_and_has_a_remedy(run: Path, tmp_path: Path, capsys) -> None:
    broken = copy_of(run, tmp_path)
    newest = sorted((broken / "checkpoints").iterdir())[-1]
    flip_a_bit(newest / "optimizer.safetensors")
    (broken / "model" / "model.safetensors").write_bytes(b"nothing")
    (broken / "checkpoints" / ".new-123").mkdir()
    found = findings(capsys, broken)
    assert found["checkpoint"]["state"] == "problem"
    assert "optimizer.safetensors" in found["checkpoint"]["found"]
    assert found["weights"]["state"] == "problem"
    assert found["leftovers"]["state"] == "note"
    assert all(item["remedy"] for item in found.values() if item["state"] == "problem")


def test_changed_data_is_found(run: Path, tmp_path: Path, capsys) -> None:
    broken = copy_of(run, tmp_path)
    (broken / "env.json").unlink()
    config = json.loads((broken / "config.json").read_text())
    config["data"]["source"] = "digits:test"
    (broken / "config.json").write_text(json.dumps(config))
    assert "not the data" in findings(capsys, broken)["data"]["found"]
    config["data"]["source"] = str(tmp_path / "gone")
    (broken / "config.json").write_text(json.dumps(config))
    assert findings(capsys, broken, "--data")["data"]["state"] == "problem"


@pytest.mark.parametrize(
    "source", ["ftp://server.example/images", "hf:somebody/images", "/elsewhere/images", "../images"]
)
def test_doctor_opens_data_only_when_asked(source: str, run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """The run may be another person's, and its config may name a server or any file of this machine."""
    foreign = copy_of(run, tmp_path)
    (foreign / "env.json").unlink()
    config = json.loads((foreign / "config.json").read_text())
    config["data"]["source"] = source
    (foreign / "config.json").write_text(json.dumps(config))
    opened: list[str] = []

    def open_data(config) -> None:
        opened.append(config.data.source)
        raise UserError("There is no such data.")

    monkeypatch.setattr("anechoic.training.build.open_data", open_data)
    found = findings(capsys, foreign)["data"]
    assert (found["state"], found["found"], opened) == ("note", f"not opened: {source}", [])
    assert findings(capsys, foreign, "--data")["data"]["state"] == "problem"
    assert opened == [source]


def test_little_shared_memory_is_a_problem(monkeypatch) -> None:
    from anechoic.training import doctor as health

    monkeypatch.setattr(health, "LITTLE_SHARED_MEMORY", 1 << 60)
    monkeypatch.setattr(health, "LITTLE_DISK", 1 << 60)
    found = {item.what: item for item in health.examine()}
    assert found["shared memory"].state == "problem"
    assert "--shm-size" in found["shared memory"].remedy
    assert found["disk here"].state == "problem"
