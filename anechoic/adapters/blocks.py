"""Other people's networks: how the blocks of timm, transformers, torchvision, diffusers and torch join their branches.

A library's block writes x + f(x) by hand. Its twin is a subclass that says the same with `self.shortcut1(x, f(x))`: a
block can change its class and keep its parameters, their names and everything else. A twin may also describe its
branches, and a stream function what surrounds the blocks; both are needed only where weights are rescaled. The algebra
is algebra.py's; each file of_LIBRARY.py knows one library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from anechoic.errors import UserError
from anechoic.shortcut import Event, Shortcut, Stream

# The package a block's class comes from -> the module here that knows it; imported when such a block is met.
LIBRARIES = {
    "torch": "torch",
    "timm": "timm",
    "transformers": "transformers",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
}
KNOWN = (
    "timm ViT, DeiT, EVA, BEiT, Swin and ResNet; transformers ViT, ViTMAE, DeiT, DINOv2, BEiT and BERT; torchvision "
    "ResNet and ViT; diffusers DiT; torch.nn.TransformerEncoderLayer; blocks given to anechoic.surgery.register; and "
    "modules with a stream() method"
)


@runtime_checkable
class DescribesStream(Protocol):
    """A module whose branches meet in Shortcuts and which tells its residual stream itself."""

    def stream(self) -> Stream: ...


class Twin:
    """What a twin adds to the block class it derives from (the last of its bases). kinds names its shortcuts in order:
    shortcut1, shortcut2, ... parts: every child and parameter the twin's forward knows; None leaves that unchecked."""

    kinds: ClassVar[tuple[str, ...]] = ("attention", "mlp")
    parts: ClassVar[str | None] = None

    def branches(self) -> list[Event]:
        """The block's part of the residual stream; without it the block can be decayed, but not folded."""
        raise UserError(
            f"{plain_class(type(self)).__name__} can be decayed, but its twin does not describe its branches: add "
            f"branches() to fold it or to preserve what it computes."
        )


StreamOf = Callable[[Any], Stream]

_twins: dict[type, type[Twin]] = {}
_streams: dict[type, StreamOf] = {}
_kept_plain: set[type] = set()
_refusals: dict[type, str] = {}
_preparations: dict[type, Callable[[Any], None]] = {}


# ---- registration


def register(twin: type) -> type:
    """Make a twin known: a subclass of (Twin, the block's class) whose forward uses its shortcuts. A decorator."""
    if not (issubclass(twin, Twin) and issubclass(twin, nn.Module)):
        raise UserError(
            f"{twin.__name__} must derive from anechoic.surgery.Twin and then from the block class it stands for."
        )
    _twins[plain_class(twin)] = twin
    return twin


def describe(model_class: type, stream: StreamOf) -> None:
    """Make known what surrounds the blocks of a model: stream(model) tells its residual stream from start to end."""
    _streams[model_class] = stream


def keep_plain(module_class: type) -> None:
    """Blocks inside this module are no part of what is decayed."""
    _kept_plain.add(module_class)


def refuse(module_class: type, reason: str) -> None:
    """A module that looks decayable and is not; the reason completes a sentence that starts with its name."""
    _refusals[module_class] = reason


def prepare(module_class: type, edit: Callable[[Any], None]) -> None:
    """An edit to make on a module whose blocks change their class."""
    _preparations[module_class] = edit


def plain_class(twin: type) -> type:
    return twin.__bases__[-1]


def through(blocks: Iterable[Any]) -> list[Event]:
    """The branches of joined blocks, in order."""
    return [event for block in blocks for event in block.branches()]


# ---- finding and joining


@dataclass(frozen=True)
class Found:
    """A residual stream in a model: the module it runs through, its shortcuts in order, and how to tell it in full."""

    module: nn.Module
    shortcuts: list[Shortcut]
    describe: Callable[[], Stream]


def join(model: nn.Module) -> list[Found]:
    """Turn every known block of the model, in place, into its twin; returns the residual streams."""
    _load_libraries(model)
    for module in list(_blocks(model)):
        if type(module) in _preparations:
            _preparations[type(module)](module)
        if type(module) in _twins:
            _join_block(module)
    _check_each_runs_once(model)
    return find(model)


def _check_each_runs_once(model: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Twin) and id(module) in names:
            raise UserError(
                f"{names[id(module)]} and {name} are the same block, and a shortcut has one alpha: give each a copy of "
                f"its own."
            )
        names[id(module)] = name


def release(model: nn.Module) -> None:
    """Turn every twin back into the block it was, in place. Its shortcuts must be plain."""
    for module in list(model.modules()):
        if isinstance(module, Twin):
            for name in _shortcut_names(module):
                assert getattr(module, name).factors == (1.0, 1.0), "only plain shortcuts can be written x + f(x)"
                delattr(module, name)
            module.__class__ = plain_class(type(module))


def find(model: nn.Module) -> list[Found]:
    """The residual streams of a joined model, in the order of its modules."""
    found: list[Found] = []
    loose: list[Any] = []
    for module in _outermost(model):
        if isinstance(module, Twin):
            loose.append(module)
        else:
            found.append(Found(module, _shortcuts_in(module), partial(_describe, module)))
    if loose:
        # Blocks of a model nobody described: their order is that of its modules, their surroundings are unknown.
        shortcuts = [shortcut for block in loose for shortcut in _shortcuts_in(block)]
        found.append(Found(model, shortcuts, lambda: Stream(tuple(through(loose)), ends_raw=True)))
    return [stream for stream in found if stream.shortcuts]


def _describe(module: Any) -> Stream:
    return _streams[type(module)](module) if type(module) in _streams else module.stream()


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that tell their stream or are described and, outside of them, twins."""
    tells = isinstance(model, DescribesStream) and any(isinstance(module, Shortcut) for module in model.modules())
    if isinstance(model, Twin) or type(model) in _streams or tells:
        yield model
    elif type(model) not in _kept_plain:
        for child in model.children():
            yield from _outermost(child)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that may change, outermost first; unknown relatives of known blocks are refused."""
    kind = type(model)
    if kind in _refusals:
        raise UserError(f"{kind.__name__} is not supported: {_refusals[kind]}; decay the parts you mean one by one.")
    if kind not in _twins and not isinstance(model, Twin):
        for known in _twins:
            if isinstance(model, known):
                raise UserError(
                    f"{kind.__name__} derives from {known.__module__}.{known.__name__}, but its forward may differ: "
                    f"register a twin for it with anechoic.surgery.register."
                )
    if kind not in _kept_plain:
        yield model
        for child in model.children():
            yield from _blocks(child)


def _join_block(block: Any) -> None:
    twin = _twins[type(block)]
    _check_parts(block, twin.parts)
    block.__class__ = twin
    for name, kind in zip(_shortcut_names(block), block.kinds, strict=True):
        block.add_module(name, Shortcut(kind=kind))


def _check_parts(block: nn.Module, parts: str | None) -> None:
    own = {name for name, _ in block.named_children()} | {name for name, _ in block.named_parameters(recurse=False)}
    unknown = sorted(own - set(parts.split())) if parts is not None else []
    if unknown:
        library = type(block).__module__.partition(".")[0]
        raise UserError(
            f"{type(block).__module__}.{type(block).__name__} has unknown parts ({', '.join(unknown)}): install the "
            f"version of {library} named in docs/your-model.md, or register a twin of your own."
        )


def _shortcut_names(block: Any) -> list[str]:
    return [f"shortcut{i + 1}" for i in range(len(block.kinds))]


def _shortcuts_in(module: nn.Module) -> list[Shortcut]:
    """In order of execution: a described module's own telling, or that of its blocks."""
    if isinstance(module, Twin):
        return [getattr(module, name) for name in _shortcut_names(module)]
    if type(module) not in _streams:
        return _describe(module).shortcuts
    blocks = [block for block in module.modules() if isinstance(block, Twin)]
    return [shortcut for block in blocks for shortcut in _shortcuts_in(block)]


def _load_libraries(model: nn.Module) -> None:
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    for package in LIBRARIES.keys() & packages:
        try:
            import_module(f"anechoic.adapters.{LIBRARIES[package]}")
        except ImportError as problem:
            raise UserError(
                f"This version of {package} lacks what anechoic knows of it ({problem}): "
                f'pip install --upgrade "anechoic[families]".'
            ) from problem
