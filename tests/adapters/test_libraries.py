"""decay, fold and preserve on networks of other libraries: laws that hold for every family."""

import copy
import io
import pickle

import pytest
import torch
from libraries_zoo import CASES, IMAGES, TOKENS, fresh, with_reference_blocks
from torch import nn

import anechoic
from anechoic import decay, fold, shortcuts
from anechoic.shortcut import linear
from anechoic.surgery import DecayedBlock, weight_factors

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
every_family = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def plain():
    made = {}
    return lambda case: made.setdefault(case, fresh(case))


def output(case, model):
    with torch.no_grad():
        return CASES[case].call(model)


@every_family
def test_alpha_one_is_the_original_bit_for_bit(case, plain):
    model = plain(case)
    joined = decay(model, 1.0)
    # torch replaces a layer of its own by one fused kernel; every other family must agree in every bit.
    tolerance = 1e-12 if case.startswith("torch-") else 0
    torch.testing.assert_close(output(case, joined), output(case, model), atol=tolerance, rtol=0)
    torch.manual_seed(7)
    expected = CASES[case].call(copy.deepcopy(model).train())
    torch.manual_seed(7)
    torch.testing.assert_close(CASES[case].call(joined.train()), expected, atol=0, rtol=0)


@every_family
def test_decay_is_the_written_out_formula(case, plain):
    model = plain(case)
    decayed = decay(model, 0.6)
    infos = shortcuts(decayed)
    alphas = linear(CASES[case].branches, 0.6)
    assert [info.alpha for info in infos] == alphas
    reference = with_reference_blocks(copy.deepcopy(model), alphas)
    torch.testing.assert_close(output(case, decayed), output(case, reference), atol=1e-12, rtol=1e-12)
    assert (output(case, decayed) - output(case, model)).abs().max() > 1e-2


@every_family
def test_preserve_keeps_the_function(case, plain):
    model = plain(case)
    preserved = decay(model, 0.6, preserve=True)
    assert shortcuts(preserved)[-1].alpha == 0.6
    torch.testing.assert_close(output(case, preserved), output(case, model), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(output(case, fold(preserved)), output(case, model), atol=1e-10, rtol=1e-10)


@every_family
def test_fold_returns_the_plain_class(case, plain):
    model = plain(case)
    decayed = decay(model, 0.6)
    folded = fold(decayed)
    torch.testing.assert_close(output(case, folded), output(case, decayed), atol=1e-10, rtol=1e-10)
    assert [type(module) for module in folded.modules()] == [type(module) for module in model.modules()]
    model_again = copy.deepcopy(model)
    model_again.load_state_dict(folded.state_dict(), strict=True)


@every_family
def test_checkpoints_of_the_original_load_and_it_is_never_edited(case, plain):
    model = plain(case)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    decayed = decay(model, 0.6, preserve=True)
    decayed.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(output(case, decay(model, 0.6)).isfinite().all(), torch.tensor(True))
    assert [type(module) for module in model.modules()] == classes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@every_family
def test_gradients_reach_every_parameter_that_had_one(case, plain):
    def reached(model):
        CASES[case].call(model.train()).square().sum().backward()
        return {name for name, parameter in model.named_parameters() if parameter.grad is not None}

    model = plain(case)
    torch.manual_seed(3)
    before = reached(copy.deepcopy(model))
    torch.manual_seed(3)
    assert before == reached(decay(model, 0.6)) != set()


@every_family
def test_copies_and_pickles_train_alike(case, plain):
    decayed = decay(plain(case), 0.6)
    buffer = io.BytesIO()
    torch.save(decayed, buffer)
    buffer.seek(0)
    others = [copy.deepcopy(decayed), pickle.loads(pickle.dumps(decayed)), torch.load(buffer, weights_only=False)]
    losses = [two_steps(case, model) for model in (decayed, *others)]
    assert losses[1:] == losses[:1] * 3
    assert losses[0][0] != losses[0][1]


def two_steps(case, model, forward=None):
    """The losses before and after one step of training."""
    model.eval()  # no drop path: the same numbers whatever runs the network
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = CASES[case].call(forward or model).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


ONE_PER_LIBRARY = [
    "timm-vit",
    "timm-resnet",
    "torchvision-resnet",
    "transformers-dinov2",
    "diffusers-dit",
    "torch-encoder",
]


# torch's tracer looks at gradients of tensors that have none and hides its warning only where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("case", ONE_PER_LIBRARY)
@pytest.mark.slow
def test_compiled_networks_train_alike(case, plain):
    decayed = decay(plain(case), 0.6)
    expected = two_steps(case, copy.deepcopy(decayed))
    torch.compiler.reset()
    decayed.compile(backend="aot_eager")
    assert two_steps(case, decayed) == pytest.approx(expected, rel=1e-9)


def train_in_process(rank, folder, cases):
    """One of two processes: each case trains two steps on its half of what the single process sees twice."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    losses = {}
    for case in cases:
        model = decay(fresh(case), 0.6).eval()
        losses[case] = two_steps(case, model, Parallel(DistributedDataParallel(model, find_unused_parameters=True)))
        losses[f"{case}, sharded"] = two_steps(case, sharded(decay(fresh(case), 0.6)))
    torch.save(losses, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def sharded(model):
    """Every joined block and the network around them under FSDP2, on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for module in list(model.modules()):
        # DiT's network reaches into its first block for the embedding of time, so its blocks stay in one piece with it.
        if isinstance(module, DecayedBlock) and "BasicTransformerBlock" not in type(module).__name__:
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Parallel:
    """DDP's wrapper called like the network inside it."""

    def __init__(self, wrapped):
        self.wrapped = wrapped

    def parameters(self):
        return self.wrapped.parameters()

    def __call__(self, *args, **kwargs):
        return self.wrapped(*args, **kwargs)


@pytest.mark.slow
def test_two_processes_train_alike(plain, tmp_path):
    expected = {case: two_steps(case, decay(plain(case), 0.6)) for case in ONE_PER_LIBRARY}
    torch.multiprocessing.spawn(train_in_process, args=(str(tmp_path), ONE_PER_LIBRARY), nprocs=2)
    for rank in (0, 1):
        losses = torch.load(tmp_path / f"{rank}.pt")
        for case, values in expected.items():
            assert losses[case] == pytest.approx(values, rel=1e-9)
            assert losses[f"{case}, sharded"] == pytest.approx(values, rel=1e-9)


@pytest.mark.parametrize("case", ["timm-vit", "timm-swin", "torchvision-resnet", "torch-encoder"])
def test_exported_programs_agree(case, plain):
    decayed = decay(plain(case), 0.6)
    x = TOKENS if case.startswith("torch-") else IMAGES
    program = torch.export.export(decayed, (x,)).module()
    torch.testing.assert_close(program(x), decayed(x), atol=1e-12, rtol=1e-12)


def test_gradient_checkpointing_still_works(plain):
    def gradients(model):
        CASES[case].call(model.train()).square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    for case, switch in (("timm-eva", "set_grad_checkpointing"), ("transformers-vit", "gradient_checkpointing_enable")):
        decayed, saving = decay(plain(case), 0.6), decay(plain(case), 0.6)
        getattr(saving, switch)()
        torch.manual_seed(0)
        expected = gradients(decayed)
        torch.manual_seed(0)
        for name, gradient in gradients(saving).items():
            torch.testing.assert_close(gradient, expected[name])


# ---- choices


@pytest.mark.parametrize("case", ["timm-vit", "transformers-bert", "torch-encoder"])
def test_only_decays_one_kind(case, plain):
    alphas = [info.alpha for info in shortcuts(decay(plain(case), 0.5, only="mlp"))]
    assert alphas == [1.0 if i % 2 == 0 else alpha for i, alpha in enumerate(linear(6, 0.5))]


def test_auto_depends_on_depth_alone(plain):
    expected = anechoic.alpha_min_for(6)
    assert shortcuts(decay(plain("timm-vit"), "auto"))[-1].alpha == max(0.5, expected)


def test_a_listed_schedule_is_used_as_it_is(plain):
    alphas = [1.0, 0.9, 0.9, 0.8, 0.8, 0.7]
    infos = shortcuts(decay(plain("timm-vit"), schedule=alphas))
    assert [info.alpha for info in infos] == alphas
    assert infos[-1].gain == pytest.approx(1 * 0.9 * 0.9 * 0.8 * 0.8 * 0.7)
    assert infos[2].name == "blocks.1.shortcut1"
    with pytest.raises(anechoic.errors.UserError, match="lists 2 alphas"):
        decay(plain("timm-vit"), schedule=[1.0, 0.9])


def test_zero_init_starts_from_the_decayed_identity():
    encoder = fresh("torch-encoder")
    started = decay(encoder, 0.6, zero_init=True)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    expected = started.norm(anechoic.effective_decay(linear(6, 0.6)) * x)
    torch.testing.assert_close(started(x), expected)


def test_shortcuts_lists_what_decay_would_find(plain):
    model = plain("transformers-vit-mae")
    infos = shortcuts(model)
    assert [info.name for info in infos][:2] == ["vit.layers.0.shortcut1", "vit.layers.0.shortcut2"]
    assert len(infos) == 6, "the decoder stays plain"
    assert not any(isinstance(module, anechoic.Shortcut) for module in model.modules())


def test_nested_models_have_a_schedule_each(plain):
    """Blocks are found wherever they are, and two networks have a schedule each."""
    pair = nn.ModuleDict({"a": copy.deepcopy(plain("timm-vit")), "b": fresh("torch-encoder")})
    infos = shortcuts(decay(pair, 0.6, preserve=True))
    assert [info.alpha for info in infos] == linear(6, 0.6) * 2
    assert infos[6].gain == 1


def test_factors_of_weights_are_the_gains(plain):
    preserved = decay(plain("timm-vit"), 0.6, preserve=True)
    factors = weight_factors(preserved)
    gains = [info.gain for info in shortcuts(preserved)]
    assert factors["blocks.2.mlp.fc2.weight"] == pytest.approx(gains[-1])
    assert factors["blocks.0.attn.proj.bias"] == 1
    for name, value in plain("timm-vit").state_dict().items():
        torch.testing.assert_close(preserved.state_dict()[name], value * factors.get(name, 1.0))


def test_a_resnet_folds_in_training_too(plain):
    decayed = decay(plain("timm-resnet"), 0.6).train()
    folded = fold(decayed)
    assert folded.training
    torch.testing.assert_close(folded(IMAGES), decayed(IMAGES), atol=1e-10, rtol=1e-10)


def test_padding_masks_survive_where_torch_would_use_nested_tensors():
    encoder = fresh("torch-encoder-post-norm")
    decayed = decay(encoder, 0.6)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        full, short = decayed(x, src_key_padding_mask=padding), decayed(x[1:, :3])
        torch.testing.assert_close(full[1:, :3], short)
        torch.testing.assert_close(fold(decayed)(x, src_key_padding_mask=padding)[1:, :3], short)
