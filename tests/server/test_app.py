"""The live page's server: the same vectors as `embed` under load, neighbors, masks, samples; stop and resume."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from serving import jpeg, make_pictures, png, serving, small_config, start_training, wait_for

import anechoic
from anechoic.config import DataConfig, ModelConfig, ObjectiveConfig, OptimConfig, SaveConfig
from anechoic.data import open_source
from anechoic.errors import UserError
from anechoic.eval.encoders import run_encoder
from anechoic.eval.reconstruction import filled_in, reconstructions
from anechoic.runtime.checkpoint import checkpoints, model_card, write_model
from anechoic.runtime.run import Run, holder, read_metrics
from anechoic.server import inference
from anechoic.server.control import Control
from anechoic.server.inference import Studio, hidden_patches
from anechoic.training.loop import fit

# ---- the network


@pytest.mark.slow
def test_two_hundred_at_twenty_at_a_time_are_what_embed_writes(client, run, pictures, tmp_path):
    anechoic.embed(run, str(pictures), out=tmp_path / "v.npz")
    written = np.load(tmp_path / "v.npz")
    expected = dict(zip(written["names"].tolist(), written["features"], strict=True))
    names = sorted(expected) * 5
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda name: client.upload("/embed", (pictures / name).read_bytes()), names))
    assert [answer.status for answer in answers] == [200] * 200
    for name, answer in zip(names, answers, strict=True):
        np.testing.assert_allclose(answer.json["vector"], expected[name], rtol=1e-4, atol=1e-5)
    assert answers[0].json["weights"] == str(written["weights"])


@pytest.mark.slow
def test_heic_is_taken_with_its_extra(client, run, monkeypatch):
    plugin = pytest.importorskip("pillow_heif", reason="no HEIC here: pip install 'anechoic[heic]'")
    file = io.BytesIO()
    plugin.from_bytes("RGB", (16, 16), bytes(range(256)) * 3).save(file)
    assert client.upload("/embed", file.getvalue()).status == 200
    damaged = client.upload("/embed", file.getvalue()[:60])
    assert (damaged.status, "no image that can be read" in damaged.json["detail"]) == (400, True)
    monkeypatch.setattr("anechoic.data.decoding.HAS_HEIC", False)
    here = Studio(run, data=None, device="cpu", pixels=1 << 20)
    (without,) = here.embed([file.getvalue()], layer=-1, pooling=None)
    assert isinstance(without, UserError)
    assert "anechoic[heic]" in str(without)


@pytest.mark.slow
def test_layer_and_pooling_are_those_asked_for(client, run, pictures, tmp_path):
    anechoic.embed(run, str(pictures), out=tmp_path / "v.npz", layer=1, pooling="mean")
    expected = np.load(tmp_path / "v.npz")["features"][3]
    found = client.upload("/embed?layer=1&pooling=mean", (pictures / "03.jpg").read_bytes()).json
    np.testing.assert_allclose(found["vector"], expected, rtol=1e-4, atol=1e-5)
    assert client.upload("/embed?layer=9", (pictures / "03.jpg").read_bytes()).status == 400


@pytest.mark.slow
def test_an_image_of_the_collection_is_its_own_neighbor(client):
    source = open_source("emoji:style=noto")
    image = png(source.read(17).permute(1, 2, 0).numpy())
    answer = client.upload("/search?k=3", image)
    for _ in range(100):  # the images are embedded first
        if answer.status != 503:
            break
        assert answer.headers["retry-after"] == "2"
        time.sleep(0.1)
        answer = client.upload("/search?k=3", image)
    found = answer.json
    assert found["searched"] == len(source)
    assert found["neighbors"][0]["name"] == source.name(17)
    assert found["neighbors"][0]["similarity"] == pytest.approx(1, abs=1e-4)
    assert len(found["neighbors"]) == 3
    assert all(near["picture"].startswith("data:image/jpeg;base64,") for near in found["neighbors"])


@pytest.mark.slow
def test_failure_to_embed_images_is_reported_and_retried(run, monkeypatch):
    gallery = inference.Gallery(run, data=None, device="cpu")
    make = inference.Collection.of

    def broken(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(inference.Collection, "of", broken)
    for _ in range(2):
        wait_for(lambda: build_problem(gallery) is not None)
        assert "cannot be searched (MemoryError('no room'))" in build_problem(gallery)
    monkeypatch.setattr(inference.Collection, "of", make)
    monkeypatch.setattr(inference, "TRY_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(inference, "PAUSE", 0.0)
    wait_for(lambda: gallery.collection is not None)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["replaced", "deleted", "added"])
def test_images_that_change_while_they_are_served_are_found_as_they_are(run, tmp_path, monkeypatch, change):
    folder = make_pictures(tmp_path)
    paths = sorted(folder.iterdir())
    query = paths[3].read_bytes()
    if change == "added":
        paths[3].rename(tmp_path.with_suffix(".jpg"))
    with serving(run, data=str(folder)) as client:
        nearest = retried(client, query)
        assert (nearest["name"] == paths[3].name, nearest["similarity"] > 0.9999) == ((change != "added"),) * 2
        if change == "replaced":
            shutil.copy(paths[5], paths[3])
        elif change == "deleted":
            paths[3].unlink()
        else:
            monkeypatch.setattr(inference, "TRY_AGAIN_SECONDS", 0.0)
            monkeypatch.setattr(inference, "PAUSE", 0.0)
            tmp_path.with_suffix(".jpg").rename(paths[3])
            wait_for(lambda: retried(client, query)["name"] == paths[3].name)
            return
        nearest = retried(client, query)
        assert nearest["similarity"] < 0.9999
        assert nearest["name"] != paths[3].name


@pytest.mark.slow
def test_weights_and_cards_swapped_under_a_server_are_never_mixed(run, pictures, tmp_path):
    """Whichever of the two files is exchanged first, an answer is that of one model or a refusal."""
    image, models = pictures / "03.jpg", {}
    for name, mean in (("one", 0.5), ("two", 0.2)):
        model = anechoic.load(run)
        with torch.no_grad():
            model.encoder.blocks[-1].attn.proj.weight.mul_(1 + mean)
        preprocess = replace(model.preprocess, mean=(mean,) * len(model.preprocess.mean))
        write_model(tmp_path / name, model.state_dict(), model_card(model, preprocess))
        models[name] = anechoic.load(tmp_path / name).embed(image)[0]
    served = tmp_path / "run"
    shutil.copytree(run, served)
    with serving(served) as client:
        for card, weights in (("one", "one"), ("one", "two"), ("two", "two"), ("two", "one"), ("one", "one")):
            for name, owner in (("config.json", card), ("model.safetensors", weights)):
                shutil.copy2(tmp_path / owner / name, served / "new")
                os.utime(served / "new", (1, 1))
                os.replace(served / "new", served / "model" / name)
            answer = client.upload("/embed", image.read_bytes())
            if card == weights:
                np.testing.assert_allclose(answer.json["vector"], models[card], rtol=1e-4, atol=1e-5)
            else:
                assert (answer.status, "config.json" in answer.json["detail"]) == (400, True)


@pytest.mark.slow
def test_two_servers_of_one_run_answer_alike(run, pictures):
    image = (pictures / "07.jpg").read_bytes()
    with serving(run, data=str(pictures)) as one, serving(run, data=str(pictures)) as two:
        nearest = [retried(client, image) for client in (one, two)]
        vectors = [client.upload("/embed", image).json for client in (one, two)]
    assert nearest[0] == nearest[1]
    assert vectors[0] == vectors[1]


def retried(client, data):
    """Return the nearest image, once the images are embedded; until then every answer refuses with that reason."""
    found = []

    def answered():
        answer = client.upload("/search?k=3", data)
        found.append(answer)
        assert answer.status == 200 or "embedded" in answer.json["detail"], answer.body
        return answer.status == 200

    wait_for(answered)
    return found[-1].json["neighbors"][0]


def build_problem(gallery):
    try:
        return gallery.collection and None
    except UserError as problem:
        return str(problem)


@pytest.mark.slow
def test_patches_are_hidden_as_asked(client, pictures):
    image = (pictures / "05.jpg").read_bytes()
    shown = client.upload("/reconstruct", image, hidden="none").json
    assert (shown["rows"], shown["columns"], shown["hidden"], shown["error"]) == (4, 4, [], 0.0)
    assert shown["reconstruction"] == shown["image"]
    some = client.upload("/reconstruct", image, hidden="3, 5,5").json
    assert some["hidden"] == [3, 5]
    assert some["reconstruction"] != some["image"]
    drawn = client.upload("/reconstruct", image, ratio="0.75", seed="4").json
    assert len(drawn["hidden"]) == 12
    assert client.upload("/reconstruct", image, ratio="0.75", seed="4").json == drawn
    for wrong in ("16", "-1", "x", ",".join(map(str, range(16))), "1;2"):
        answer = client.upload("/reconstruct", image, hidden=wrong)
        assert answer.status == 400
        assert answer.json["detail"].endswith(".")


@pytest.mark.slow
def test_hidden_patches_leave_one_visible():
    assert hidden_patches(10, None, ratio=1.0, seed=0).sum() == 9
    assert hidden_patches(10, None, ratio=0.0, seed=0).sum() == 0
    with pytest.raises(UserError, match="visible"):
        hidden_patches(2, [0, 1], ratio=0, seed=0)


@pytest.mark.slow
def test_mask_of_training_has_the_reconstruction_of_training(run):
    """Hiding what the model itself would hide yields its own prediction."""
    encoder = run_encoder(run)
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    _, places, predicted = reconstructions(encoder, images, seed=5)
    hidden = torch.from_numpy(places[:, ::4, ::4].reshape(3, -1).copy())
    again = filled_in(encoder, images, hidden)
    assert (again[1] == places).all()
    np.testing.assert_allclose(again[2][places], predicted[places], atol=1e-5)


@pytest.mark.slow
def test_patch_tokens_are_shown_as_colors(client, pictures):
    found = client.upload("/patches", (pictures / "05.jpg").read_bytes()).json
    assert found["patches"].startswith("data:image/jpeg;base64,")


@pytest.mark.slow
def test_an_autoencoder_makes_no_samples(client):
    answer = client.post("/sample", b"{}", content_type="application/json")
    assert answer.status == 400
    assert "no diffusion or flow model" in answer.json["detail"]


@pytest.mark.slow
def test_a_denoiser_makes_samples(tmp_path):
    denoiser = small_config(
        data=DataConfig(source="digits", image_size=8, channels=1, holdout=32, mean=(0.5,), std=(0.5,), flip=False),
        model=ModelConfig("uvit_small", {"patch_size": 2, "dim": 24, "depth": 2, "num_heads": 2}),
        objective=ObjectiveConfig("noise_prediction"),
        optim=OptimConfig(batch_size=32, samples=64, lr=1e-3),
    )
    fit(denoiser, tmp_path / "run")
    with serving(tmp_path / "run") as client:
        body = json.dumps({"num": 2, "steps": 3, "seed": 5}).encode()
        found = client.post("/sample", body, content_type="application/json").json
        assert len(found["images"]) == 2
        assert found["evaluations"] == 3
        assert client.post("/sample", body, content_type="application/json").json == found
        assert client.post("/sample", b'{"num": 17}', content_type="application/json").status == 422
        assert b'id="make"' in client.get("/").body
        digit = png(open_source("digits", channels=1).read(0)[0].numpy())
        assert client.upload("/embed", digit).json["dim"] == 24
        assert client.upload("/reconstruct", digit).status == 400


# ---- the page


@pytest.mark.slow
def test_the_page_is_whole_and_fetches_nothing_from_elsewhere(client):
    answer = client.get("/")
    assert answer.status == 200
    page = answer.body.decode()
    assert "connect-src 'self'" in page
    assert "http://" not in page
    assert "https://" not in page


@pytest.mark.slow
def test_status_reports_progress(client, run):
    found = client.get("/status").json
    assert found["state"] == "finished"
    assert (found["seen"], found["samples"]) == (320, 320)
    assert found["loss"] == [r["loss"] for r in read_metrics(run) if r["kind"] == "train"][-1]
    assert found["charts"].startswith("<figure>")
    assert found["resume_command"] == ""
    verdict = client.get("/verdict").json
    assert verdict["word"].capitalize() in verdict["html"]


@pytest.mark.slow
def test_the_whole_report_is_served(client):
    answer = client.get("/report")
    assert answer.status == 200
    assert b"<h2>Layer by layer</h2>" in answer.body


@pytest.mark.slow
def test_the_api_describes_itself(client):
    paths = client.get("/openapi.json").json["paths"]
    assert {"/embed", "/search", "/reconstruct", "/patches", "/sample", "/status", "/stop", "/resume"} <= paths.keys()
    assert client.get("/docs").status == 404  # it would fetch its scripts from elsewhere


# ---- stop and resume


@pytest.mark.slow
def test_a_training_is_followed_stopped_and_resumed(tmp_path):
    """By the process that holds the lock; the weights are those of a training that was never stopped."""
    long = small_config(optim=OptimConfig(batch_size=32, samples=32 * 150, lr=2e-3), save=SaveConfig(every=32 * 1000))
    path = tmp_path / "run"
    process = start_training(long, path)
    try:
        wait_for(lambda: len(read_metrics(path)) > 3, 120, every=0.2)
        with serving(path) as client:
            status = client.get("/status").json
            assert status["state"] == "running"
            assert 0 < status["seen"] < 32 * 150
            assert holder(path) == process.pid
            assert client.upload("/embed", jpeg(np.zeros((16, 16, 3), np.uint8))).status == 409
            assert client.post("/resume").status == 400
            assert client.post("/stop").status == 200
            assert process.wait(timeout=60) == 128 + signal.SIGTERM
            stopped = client.get("/status").json
            assert stopped["state"] == "stopped"
            assert stopped["seen"] < 32 * 150
            assert int(checkpoints(path / "checkpoints")[-1].name) == stopped["seen"]
            assert "anechoic.training" in stopped["resume_command"]
            assert client.post("/stop").status == 400
            assert client.post("/resume").status == 200
            assert client.get("/status").json["state"] == "running"
            wait_for(lambda: client.get("/status").json["state"] == "finished", 180, every=0.5)
    finally:
        process.kill()
        process.wait()
    fit(long, tmp_path / "straight")
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (path, tmp_path / "straight")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_holder_is_the_owner_of_the_lock_on_this_machine(tmp_path):
    assert holder(tmp_path) is None
    with Run(tmp_path):
        assert holder(tmp_path) == os.getpid()
        (tmp_path / ".owner").write_text("process 1 on another-machine")
        assert holder(tmp_path) is None
        (tmp_path / ".owner").write_text("nonsense")
        assert holder(tmp_path) is None
    (tmp_path / ".owner").write_text(f"process 1 on {socket.gethostname()}")  # left behind by a killed process
    assert holder(tmp_path) is None


# ---- regressions


@pytest.mark.slow
def test_close_waits_for_a_slow_save(run):
    class SlowTraining:
        """Exits only when nobody limits the wait."""

        ended = False

        def poll(self):
            return 0 if self.ended else None

        def terminate(self):
            pass

        def wait(self, timeout=None):
            if timeout is not None:
                raise subprocess.TimeoutExpired("training", timeout)
            self.ended = True

    control = Control(run)
    control.resumed = SlowTraining()
    control.close()
    assert control.resumed.ended


@pytest.mark.slow
def test_replaced_weights_are_served(run, pictures, tmp_path):
    served = tmp_path / "run"
    shutil.copytree(run, served)
    image = (pictures / "03.jpg").read_bytes()
    with serving(served) as client:
        before = client.upload("/embed", image).json
        model = anechoic.load(served)
        with torch.no_grad():
            model.encoder.blocks[-1].attn.proj.weight.mul_(2)
        write_model(served / "model", model.state_dict(), model_card(model, model.preprocess))
        after = client.upload("/embed", image).json
        assert after["weights"] != before["weights"]
        anechoic.embed(served, str(pictures), out=tmp_path / "v.npz")
        np.testing.assert_allclose(after["vector"], np.load(tmp_path / "v.npz")["features"][3], rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            model.encoder.blocks[-1].attn.proj.bias.fill_(float("nan"))
            model.decoder_norm.bias.fill_(float("nan"))
        write_model(served / "model", model.state_dict(), model_card(model, model.preprocess))
        for path in ("/embed", "/patches", "/reconstruct"):
            refused = client.upload(path, image)
            assert (refused.status, "contain NaN or infinity" in refused.json["detail"]) == (400, True)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", '"x"'])
def test_values_that_are_no_json_numbers_are_refused(client, value):
    body = f'{{"guidance": {value}}}'.encode()
    answer = client.post("/sample", body, content_type="application/json")
    assert answer.status == 422
    assert answer.json["detail"][0]["loc"] == ["body", "guidance"]


# ---- a run that changes under the server


@pytest.mark.slow
def test_deleted_run_does_not_reappear(run, pictures, tmp_path):
    served = tmp_path / "run"
    shutil.copytree(run, served)
    with serving(served, data=str(pictures)) as client:
        assert client.get("/status").status == 200
        shutil.rmtree(served)
        image = (pictures / "00.jpg").read_bytes()
        answers = [client.get(path) for path in ("/", "/status", "/verdict", "/report")]
        answers += [client.post("/stop"), client.post("/resume"), client.upload("/embed", image)]
        for answer in answers:
            assert answer.status == 400, answer.body
            assert re.search(r"There is no run|was deleted|No process", answer.json["detail"])
    assert not served.exists()


@pytest.mark.slow
def test_names_of_any_bytes_are_found(run, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "odd")
    os.rename(tmp_path / "odd" / "00.jpg", os.fsencode(tmp_path / "odd") + b"/\xff\x1b.jpg")
    with serving(run, data=str(tmp_path / "odd")) as client:
        wait_for(lambda: client.served.gallery.collection is not None)
        found = client.upload("/search?k=1", (pictures / "00.jpg").read_bytes())
        assert found.json["neighbors"][0]["name"] == "\\udcff\x1b.jpg"
