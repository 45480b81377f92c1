"""Distances between feature statistics: against scipy, torchmetrics and closed forms; merging; files; networks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import make

from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.eval import extractors, frechet
from anechoic.eval.inception import Inception
from anechoic.runtime.checkpoint import model_card, write_model


def features(count: int, dimensions: int = 16, *, seed: int = 0, shift: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(dimensions, dimensions)) / dimensions**0.5
    return (generator.normal(size=(count, dimensions)) @ mixing + shift).astype(np.float32)


def by_sqrtm(a: np.ndarray, b: np.ndarray) -> float:
    """The textbook formula with scipy's matrix root."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    root = scipy.linalg.sqrtm(np.cov(a.T) @ np.cov(b.T))
    shift = a.mean(0) - b.mean(0)
    return float(shift @ shift + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root.real))


# ---- the distance ---------------------------------------------------------------------------------------------------


def test_distance_equals_the_matrix_root_formula() -> None:
    a, b = features(500), features(400, seed=1, shift=0.3) * 1.4
    found = frechet.frechet_distance(frechet.statistics(a), frechet.statistics(b))
    assert found == pytest.approx(by_sqrtm(a, b), rel=1e-6)


def test_distance_equals_torchmetrics() -> None:
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Pixels(nn.Module):
        """Images are their own features."""

        num_features = 48

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).float()

    generator = torch.Generator().manual_seed(0)
    real, fake = (torch.rand(300, 3, 4, 4, generator=generator) * scale for scale in (1.0, 0.8))
    peer = FrechetInceptionDistance(feature=Pixels(), normalize=True, input_img_size=(3, 4, 4))
    peer.set_dtype(torch.float64)
    peer.update(real, real=True)
    peer.update(fake, real=False)
    ours = frechet.frechet_distance(*(frechet.statistics(x.flatten(1)) for x in (real, fake)))
    assert ours == pytest.approx(float(peer.compute()), rel=1e-3)


def test_distance_of_a_set_with_itself_is_nothing() -> None:
    same = frechet.statistics(features(300, 64))
    assert abs(frechet.frechet_distance(same, same)) < 1e-3


@settings(deadline=None, max_examples=20)
@given(scale=st.floats(0.1, 3), shift=st.floats(-2, 2))
def test_distance_of_gaussians_is_known(scale: float, shift: float) -> None:
    """b = scale * a + shift commutes with a: ||difference of means||^2 + (1 - scale)^2 tr C."""
    a = features(200, 8).astype(np.float64)
    one, other = frechet.statistics(a), frechet.statistics(scale * a + shift)
    means = one.mean - other.mean
    expected = means @ means + (1 - scale) ** 2 * np.trace(one.covariance)
    assert frechet.frechet_distance(one, other) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_distance_is_symmetric_even_when_singular() -> None:
    few, many = frechet.statistics(features(10, 32)), frechet.statistics(features(500, 32, seed=1))
    assert frechet.frechet_distance(few, many) == pytest.approx(frechet.frechet_distance(many, few), rel=1e-6)


# ---- merging and files ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(cut=st.integers(1, 98))
def test_merged_halves_equal_the_whole(cut: int) -> None:
    points = features(99, 8, shift=5)
    merged = frechet.merge(frechet.statistics(points[:cut]), frechet.statistics(points[cut:]))
    whole = frechet.statistics(points)
    assert merged.count == 99
    np.testing.assert_allclose(merged.mean, whole.mean, rtol=1e-10)
    np.testing.assert_allclose(merged.covariance, whole.covariance, rtol=1e-8, atol=1e-10)
    np.testing.assert_array_equal(merged.points, whole.points)


def test_statistics_survive_the_disk(tmp_path: Path) -> None:
    extractor = extractors.Extractor("fd-pixels", lambda x: x.flatten(1), "abc", channels=None)
    images = torch.arange(5 * 12, dtype=torch.uint8).view(5, 3, 2, 2)
    found = frechet.measure_images(images.split(2), extractor, images={"source": "here"})
    frechet.save_statistics(tmp_path / "s.npz", found)
    assert frechet.is_statistics(tmp_path / "s.npz")
    read = frechet.load_statistics(tmp_path / "s.npz")
    assert read.extractor == extractor.receipt()
    assert read.images == {"source": "here", "count": 5}
    np.testing.assert_array_equal(read.scatter, found.scatter)
    np.testing.assert_array_equal(read.points, images.flatten(1).numpy() / np.float32(255))


def test_statistics_are_written_whole_into_folders_that_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = frechet.statistics(features(40))
    with pytest.raises(UserError, match=r"kept in an \.npz file"):
        frechet.save_statistics(tmp_path / "statistics", found)
    frechet.save_statistics(tmp_path / "new" / "statistics.npz", found)
    before = (tmp_path / "new" / "statistics.npz").read_bytes()
    monkeypatch.setattr(np, "savez", lambda file, **arrays: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        frechet.save_statistics(tmp_path / "new" / "statistics.npz", found)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["statistics.npz"]
    assert (tmp_path / "new" / "statistics.npz").read_bytes() == before


def test_features_that_are_no_numbers_are_refused() -> None:
    broken = features(40)
    broken[3, 2] = np.nan
    with pytest.raises(UserError, match="NaN or infinity"):
        frechet.statistics(broken)


def test_plain_arrays_are_not_statistics(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 4, 4), np.uint8))
    assert not frechet.is_statistics(tmp_path / "images.npz")
    assert not frechet.is_statistics(tmp_path / "absent.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(UserError, match="not a complete NumPy file"):
        frechet.is_statistics(tmp_path / "text.npz")


def test_other_extractors_and_other_resizing_do_not_mix() -> None:
    points = features(20, 4)
    one = frechet.statistics(points, extractor={"metric": "fid", "antialias": False})
    other = frechet.statistics(points, extractor={"metric": "fid", "antialias": True})
    with pytest.raises(UserError, match=r"different extractors .*antialias"):
        frechet.frechet_distance(one, other)
    with pytest.raises(UserError, match="number of features"):
        frechet.compare(frechet.statistics(points), frechet.statistics(features(20, 5)))


def test_too_few_images_are_said_to_be_biased() -> None:
    with pytest.warns(UserWarning, match="10 images are fewer than the 16 features"):
        frechet.compare(frechet.statistics(features(10)), frechet.statistics(features(40, seed=1)))


def test_one_image_is_refused() -> None:
    extractor = extractors.Extractor("fd", lambda x: x.flatten(1), "")
    with pytest.raises(UserError, match="at least 2 images"):
        frechet.measure_images([torch.zeros(1, 3, 2, 2, dtype=torch.uint8)], extractor, images={})


# ---- kernel distance, precision and recall --------------------------------------------------------------------------


def test_kernel_distance_equals_torchmetrics() -> None:
    from torchmetrics.image.kid import poly_mmd

    a, b = features(200), features(200, seed=1, shift=0.5)
    x, y = torch.from_numpy(a).double(), torch.from_numpy(b).double()
    ours, deviation = frechet.kernel_distance(a, b, subsets=3, subset_size=200)
    assert ours == pytest.approx(float(poly_mmd(x, y, degree=3, gamma=None, coef=1.0)), rel=1e-6)
    assert deviation == pytest.approx(0, abs=1e-9)


def test_kernel_distance_of_one_law_is_near_nothing() -> None:
    near, _ = frechet.kernel_distance(features(600), features(600, seed=1), subset_size=300)
    far, _ = frechet.kernel_distance(features(600), features(600, seed=1, shift=0.5), subset_size=300)
    assert abs(near) < 0.02 * far


def test_precision_and_recall_tell_quality_from_variety() -> None:
    real = features(400, 4)
    assert frechet.precision_recall(real, real) == (1.0, 1.0)
    # A tight cluster inside the data: every sample is plausible, most of the data is missed.
    precision, recall = frechet.precision_recall(real, real[:1] + 0.01 * features(400, 4, seed=1))
    assert precision > 0.95
    assert recall < 0.1
    assert frechet.precision_recall(real, features(400, 4, seed=2, shift=50)) == (0.0, 0.0)


def test_coverage_equals_the_definition() -> None:
    manifold, queries = (torch.from_numpy(features(n, 3, seed=n)) for n in (40, 30))
    within = torch.cdist(manifold, manifold).sort(dim=1).values[:, 3]
    expected = (torch.cdist(queries, manifold) <= within).any(dim=1).float().mean()
    assert frechet.coverage(manifold, queries, neighbors=3, chunk=7) == pytest.approx(float(expected))


# ---- networks -------------------------------------------------------------------------------------------------------


def test_lite0_recognizes_real_images(shared_data: Path) -> None:
    from PIL import Image

    efflite0 = extractors.efflite0()
    assert isinstance(efflite0.network, extractors.EfficientNetLite0)
    right = 0
    # ImageNet's numbers of four classes that leave little room for argument.
    for name, number in (("tench", 0), ("english_springer", 217), ("golf_ball", 574), ("parachute", 701)):
        for file in sorted((shared_data / "imagenette" / "val" / name).iterdir())[:4]:
            pixels = np.asarray(Image.open(file).convert("RGB"))
            found = efflite0(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])
            assert found.shape == (1, 1280)
            right += int(efflite0.network.classifier(found).argmax()) == number
    assert right >= 14


def test_inception_is_that_of_the_fid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's network with the pooling of the original graph, on random weights."""
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    peer = torchvision.models.inception_v3(weights=None, init_weights=False, transform_input=False).eval()
    torch.save(peer.state_dict(), tmp_path / "weights.pth")
    ours = extractors.inception(tmp_path / "weights.pth")
    assert ours.metric == "fid"
    assert isinstance(ours.network, Inception)

    plain = F.avg_pool2d
    monkeypatch.setattr(F, "avg_pool2d", lambda x, **options: plain(x, **options, count_include_pad=False))
    last = peer.Mixed_7c

    def with_maximum(x: Tensor) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(F, "avg_pool2d", lambda y, **options: F.max_pool2d(y, **options))
            return torch.cat(last._forward(x), dim=1)

    monkeypatch.setattr(last, "forward", with_maximum)
    peer.fc = nn.Identity()
    x = torch.rand(1, 3, 299, 299, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.inference_mode():
        theirs = peer(x)
        monkeypatch.undo()
        torch.testing.assert_close(ours.network(x), theirs, rtol=1e-4, atol=1e-5)


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no weights file"):
        extractors.inception(tmp_path / "absent.pth")
    (tmp_path / "text.pth").write_text("weights")
    with pytest.raises(UserError, match="not a file of network weights"):
        extractors.inception(tmp_path / "text.pth")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="does not hold the weights"):
        extractors.inception(tmp_path / "other.pth")
    with pytest.raises(UserError, match="belongs to --extractor inception"):
        extractors.extractor_named("efflite0", weights=tmp_path / "other.pth")
    with pytest.raises(UserError, match="no extractor 'inceptoin'"):
        extractors.extractor_named("inceptoin")


def test_a_failed_download_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", refuse)
    with pytest.raises(UserError, match="--weights PATH"):
        extractors.inception()


def test_gray_images_are_shown_in_color_and_others_refused() -> None:
    extractor = extractors.Extractor("fd", lambda x: x.mean(dim=(2, 3)), "", size=4, mean=(0.5,), std=(0.5,))
    gray = torch.full((2, 1, 8, 8), 255, dtype=torch.uint8)
    torch.testing.assert_close(extractor(gray), torch.ones(2, 3))
    with pytest.raises(UserError, match="3 channels, these have 2"):
        extractor(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))


def test_diffusion_runs_are_refused_as_extractors(tmp_path) -> None:
    for family in ("uvit-conditional", "sit"):
        model = make(family)
        channels = model.config.in_channels
        preprocess = Preprocess((0.5,) * channels, (0.5,) * channels, model.config.image_size, channels)
        write_model(tmp_path / family, model.state_dict(), model_card(model, preprocess))
        with pytest.raises(UserError, match=f"{family} is a diffusion model, whose features depend on a noise level"):
            extractors.extractor_named(str(tmp_path / family))
