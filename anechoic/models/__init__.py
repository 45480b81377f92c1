"""The table of sizes, and how a model is built from a name, a config or JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from anechoic.config import checked, hints
from anechoic.errors import UserError, nearest_name
from anechoic.models.mae import MAEConfig, MaskedAutoencoder
from anechoic.models.network import Network, NetworkConfig
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


# Numbers beyond these in a file are damage.
MAX_BLOCKS, MAX_SIZE = 1000, 1 << 20


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
    """Return the complete config of a named model with some options replaced."""
    if name not in MODELS:
        raise UserError(
            f"There is no model {name!r}; {nearest_name(name, MODELS, offered=3)} (anechoic list models lists all)"
        )
    family, size = MODELS[name]
    kinds = hints(FAMILIES[family][0])
    given = {
        key: checked(_python_number(value), kinds[key], key)
        for key, value in options.items()
        if key in kinds and not (key == "schedule" and callable(value))
    }
    return _config(family, {**size, **options, **given}, what=name)


def _python_number(value: Any) -> Any:
    """Return a number of numpy as Python's."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


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
    """Return a freshly initialized network of this config."""
    return FAMILIES[family_of(config)][1](config)


def build_model(name: str, **options: Any) -> Network:
    """Return a freshly initialized network by name: build_model("mae_base_patch16", alpha_min=0.6).

    Common options: alpha_min (number or "auto"; 1 is plain), schedule (a name, alphas, or a function
    of n and alpha_min that returns them), form, image_size (a number, or height and
    width), in_channels, zero_init; the sizes (dim, depth, num_heads, ...) can be replaced too.
    """
    return build(model_config(name, **options))


# Options of earlier versions whose records still load: with this value they change nothing.
RETIRED = [("skip_norm", False)]


def to_json(config: NetworkConfig) -> dict[str, Any]:
    """Return the config as plain JSON data, with the resolved alphas for readers."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value for name, value in dataclasses.asdict(config).items()
    }
    return {"family": family_of(config), **fields, "alphas": [alpha for alpha, _ in config.factors]}


def from_json(data: dict[str, Any]) -> NetworkConfig:
    """Invert to_json. The data may come from a damaged file: every value is checked for type and size."""
    fields = {name: value for name, value in data.items() if name not in ("family", "alphas")}
    fields = {name: value for name, value in fields.items() if (name, value) not in RETIRED}
    family = data.get("family")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"This model config names the family {family!r:.60}; known are {', '.join(FAMILIES)}.")
    kinds = hints(FAMILIES[family][0])
    fields = {
        name: _within_limits(name, checked(value, kinds[name], name) if name in kinds else value)
        for name, value in fields.items()
    }
    return _config(family, fields, what=f"the family {family}")


def _within_limits(name: str, value: Any) -> Any:
    """Return the value, if no number in it is beyond what any network has."""
    numbers = [item for item in (value if isinstance(value, tuple) else (value,)) if type(item) in (int, float)]
    if isinstance(value, tuple) and len(value) > 4 * MAX_BLOCKS:
        raise UserError(f"This model config lists {len(value):,} values of {name}, more than any network has.")
    limit = MAX_BLOCKS if name in ("depth", "decoder_depth", "num_blocks") else MAX_SIZE
    if not all(math.isfinite(number) and 0 <= number <= limit for number in numbers):
        raise UserError(f"This model config has {name} = {value!r:.60}, which no network has (0 to {limit:,}).")
    return value
