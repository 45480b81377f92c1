"""What decay and fold refuse, by name and with a remedy, rather than be silently wrong."""

import copy

import pytest
import torch
from libraries_zoo import fresh, timm_resnet, vit
from torch import nn

import anechoic
from anechoic import decay, fold, shortcuts
from anechoic.errors import UserError
from anechoic.surgery import DecayedBlock, register

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def plain():
    made = {}
    return lambda case: made.setdefault(case, fresh(case))


def test_unknown_networks_are_refused_with_the_known_ones():
    for act in (decay, fold, shortcuts):
        with pytest.raises(UserError, match=r"Nothing in Sequential.*timm ViT.*TransformerEncoderLayer"):
            act(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    with pytest.raises(UserError, match="Nothing in Linear"):
        decay(nn.Linear(3, 3), "auto")


def test_blocks_in_parallel_are_refused_by_name():
    pytest.importorskip("timm", reason="timm is what this test is about")
    from timm.models.vision_transformer import ParallelScalingBlock

    with pytest.raises(UserError, match="ParallelScalingBlock is not supported: its attention and MLP"):
        decay(vit(block_fn=ParallelScalingBlock))


def test_a_subclass_with_a_forward_of_its_own_is_refused():
    class Louder(nn.TransformerEncoderLayer):
        def forward(self, src, *args, **kwargs):
            return 2 * super().forward(src, *args, **kwargs)

    with pytest.raises(UserError, match=r"Louder derives from .*TransformerEncoderLayer.*register"):
        decay(nn.Sequential(Louder(24, 2)))


def test_a_block_with_unknown_parts_is_refused(plain):
    model = copy.deepcopy(plain("timm-vit"))
    model.blocks[1].adapter = nn.Linear(24, 24)
    with pytest.raises(UserError, match=r"Block has unknown parts \(adapter\)"):
        decay(model)


def test_unknown_surroundings_can_be_decayed_but_not_folded():
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True, norm_first=True)
    loose = nn.Sequential(layer, nn.Linear(24, 3))
    decayed = decay(loose, 0.6)
    assert len(shortcuts(decayed)) == 2
    for act in (fold, lambda model: decay(loose, 0.6, preserve=True)):
        with pytest.raises(UserError, match="read by something unknown"):
            act(decayed)


def test_hidden_states_between_layers_cannot_be_rescaled():
    pytest.importorskip("transformers", reason="transformers is what this test is about")
    import transformers

    config = transformers.BeitConfig(
        hidden_size=24, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8,
        out_indices=[1, 2, 3, 4], pool_scales=[1], use_auxiliary_head=False,
    )  # fmt: skip
    decayed = decay(transformers.BeitForSemanticSegmentation(config), 0.6)
    assert len(shortcuts(decayed)) == 8
    with pytest.raises(UserError, match="read by something unknown"):
        fold(decayed)


@pytest.mark.parametrize(
    ("options", "reason"), [({"block_args": {"attn_layer": "se"}}, "SE"), ({"act_layer": "gelu"}, "GELU")]
)
def test_a_resnet_that_no_factor_passes_is_decayed_but_not_folded(options, reason):
    pytest.importorskip("timm", reason="timm is what this test is about")
    decayed = decay(timm_resnet("BasicBlock", **options), 0.6)
    assert decayed.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    with pytest.raises(UserError, match=f"{reason}.* can be decayed, but not folded"):
        fold(decayed)


def test_shared_weights_are_refused():
    layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(24), enable_nested_tensor=False)
    encoder.layers[1].linear2 = encoder.layers[0].linear2
    with pytest.raises(UserError, match="several places of the stream"):
        decay(encoder, 0.6, preserve=True)


def test_a_network_of_ours_inside_another_module_is_converted_by_itself():
    vit = anechoic.build_model("vit_tiny_patch4", image_size=8, dim=24, depth=2, num_heads=2, alpha_min=0.6)
    wrapped = nn.Sequential(vit, nn.Linear(24, 3))
    assert shortcuts(wrapped)[0].name == "0.blocks.0.shortcut1"
    for act in (fold, decay):
        with pytest.raises(UserError, match="VisionTransformer inside Sequential is a network of ours"):
            act(wrapped)


def test_one_block_that_runs_twice_is_refused(plain):
    model = copy.deepcopy(plain("timm-vit"))
    model.blocks[2] = model.blocks[0]
    with pytest.raises(UserError, match=r"blocks\.0 and blocks\.2 are the same block"):
        decay(model)


def test_parametrized_weights_are_refused_where_they_would_have_to_change(plain):
    written, read = copy.deepcopy(plain("timm-vit")), copy.deepcopy(plain("timm-resnet"))
    nn.utils.parametrizations.weight_norm(written.blocks[1].mlp.fc2)
    nn.utils.parametrizations.weight_norm(read.layer3[0].conv1)
    assert len(shortcuts(decay(written, 0.6))) == 6
    with pytest.raises(UserError, match="ParametrizedLinear cannot be rescaled"):
        decay(written, 0.6, preserve=True)
    with pytest.raises(UserError, match=r"ParametrizedConv2d\.weight is computed from other tensors"):
        decay(read, 0.6, preserve=True)


def test_decaying_twice_is_refused(plain):
    with pytest.raises(UserError, match="not plain: fold it first"):
        decay(decay(plain("timm-vit"), 0.6), 0.6)


def test_the_decoder_layers_of_torch_are_refused():
    with pytest.raises(UserError, match="TransformerDecoderLayer is not supported"):
        decay(nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 2), 1))


def test_other_uses_of_the_block_of_dit_are_refused():
    pytest.importorskip("diffusers", reason="diffusers is what this test is about")
    from diffusers.models.attention import BasicTransformerBlock

    with pytest.raises(UserError, match="used with 'layer_norm'"):
        decay(nn.Sequential(BasicTransformerBlock(24, 2, 12)))


def test_register_refuses_other_classes():
    with pytest.raises(UserError, match=r"Linear must derive from anechoic\.surgery\.DecayedBlock"):
        register(nn.Linear)


def test_fold_refuses_a_block_without_branches():
    class Block(nn.Module):
        def forward(self, x):
            return x + x.sin()

    @register
    class Decayed(DecayedBlock, Block):
        kinds = ("mlp",)

        def forward(self, x):
            return self.shortcut1(x, x.sin())

    decayed = decay(nn.Sequential(Block(), Block()), 0.5)
    x = torch.randn(3)
    y = x + x.sin()
    torch.testing.assert_close(decayed(x), 0.5 * y + y.sin())
    with pytest.raises(UserError, match="Block can be decayed, but its DecayedBlock does not describe"):
        fold(decayed)
