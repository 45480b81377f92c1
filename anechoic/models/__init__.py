"""The table of sizes, and how a model is built from a name, a config or JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from anechoic.errors import UserError, nearest_name
from anechoic.models.layers import Network, NetworkConfig
from anechoic.models.mae import MAEConfig, MaskedAutoencoder
from anechoic.models.resnet import ResNet, ResNetConfig
from anechoic.models.sit import SiT, SiTConfig
from anechoic.models.uvit import UViT, UViTConfig
from anechoic.models.vit import VisionTransformer, ViTConfig

FAMILIES: dict[str, tuple[type[NetworkConfig], type[Network]]] = {
    "vit": (ViTConfig, VisionTransformer),
    "mae": (MAEConfig, MaskedAutoencoder),
    "uvit": (UViTConfig, UViT),
    "sit": (SiTConfig, SiT),
    "resnet": (ResNetConfig, ResNet),
}


def _sizes(**columns: tuple) -> dict[str, dict[str, Any]]:
    """{"tiny": {"dim": 192, ...}, ...} from name=(dim, depth, num_heads)."""
    return {name: dict(zip(("dim", "depth", "num_heads"), row, strict=True)) for name, row in columns.items()}


VIT_SIZES = _sizes(tiny=(192, 12, 3), small=(384, 12, 6), base=(768, 12, 12), large=(1024, 24, 16), huge=(1280, 32, 16))

UVIT_SIZES = _sizes(small=(512, 12, 8), mid=(768, 16, 12), large=(1024, 20, 16), huge=(1152, 28, 16))
SIT_SIZES = _sizes(s=(384, 12, 6), b=(768, 12, 12), l=(1024, 24, 16), xl=(1152, 28, 16))


def _table() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every model's name -> (family, the options that make its size)."""
    table: dict[str, tuple[str, dict[str, Any]]] = {}
    for family in ("vit", "mae"):
        for size, options in VIT_SIZES.items():
            for patch in (4, 8, 14, 16):
                table[f"{family}_{size}_patch{patch}"] = (family, {**options, "patch_size": patch})
    for size, options in UVIT_SIZES.items():
        table[f"uvit_{size}"] = ("uvit", {**options, "final_conv": size != "huge"})
    for size, options in SIT_SIZES.items():
        for patch in (2, 4, 8):
            table[f"sit_{size}_patch{patch}"] = ("sit", {**options, "patch_size": patch})
    table["resnet18"] = ("resnet", {})
    return table


MODELS = _table()


def model_config(name: str, **options: Any) -> NetworkConfig:
    """The complete config of a named model with some options replaced."""
    if name not in MODELS:
        raise UserError(
            f"There is no model {name!r}; {nearest_name(name, MODELS, offered=3)} (anechoic models lists all)"
        )
    family, size = MODELS[name]
    return _config(family, {**size, **options}, what=name)


def _config(family: str, options: dict[str, Any], *, what: str) -> NetworkConfig:
    config_class = FAMILIES[family][0]
    known = {field.name for field in dataclasses.fields(config_class)}
    for option in options:
        if option not in known:
            raise UserError(f"{what} has no option {option!r}; {nearest_name(option, sorted(known), offered=3)}")
    return config_class(**options)


def family_of(config: NetworkConfig) -> str:
    return next(name for name, (config_class, _) in FAMILIES.items() if type(config) is config_class)


def build(config: NetworkConfig) -> Network:
    """A freshly initialised network of this config."""
    return FAMILIES[family_of(config)][1](config)


def build_model(name: str, **options: Any) -> Any:
    """A freshly initialised network by name: build_model("mae_base_patch16", alpha_min=0.6).

    Common options: alpha_min (number or "auto"; 1 is plain), schedule, form, image_size (side, or height and width),
    in_channels, zero_init; the sizes (dim, depth, num_heads, ...) can be replaced too.
    """
    return build(model_config(name, **options))


def to_json(config: NetworkConfig) -> dict[str, Any]:
    """The config as plain JSON data, with the resolved alphas beside it for readers."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(config).items()
    }
    return {"family": family_of(config), **fields, "alphas": [alpha for alpha, _ in config.factors]}


def from_json(data: dict[str, Any]) -> NetworkConfig:
    """The inverse of to_json."""
    fields = {name: value for name, value in data.items() if name not in ("family", "alphas")}
    if data.get("family") not in FAMILIES:
        raise UserError(f"This model config names the family {data.get('family')!r}; known are {', '.join(FAMILIES)}.")
    return _config(data["family"], fields, what=f"the family {data['family']}")
