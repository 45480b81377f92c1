"""How the blocks of other libraries join their branches: registration, and the exchange of a block's class.

A library's block writes x + f(x) by hand. Its decayed version is a class whose forward computes the same with
`self.shortcut1(x, f(x))`: the block changes its class and keeps its parameters, their names and everything else. It may
also describe its branches, and a stream function what surrounds the blocks; both are needed only where weights are
rescaled. The algebra is in surgery/algebra.py; each file NAME.py beside this one knows one library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import nn

from anechoic.adapters.registry import ADAPTERS
from anechoic.errors import UserError
from anechoic.models.layers import weight_and_bias
from anechoic.shortcut import Branch, Event, Read, Shortcut, Slot, Stream, Write


@runtime_checkable
class DescribesStream(Protocol):
    """A module whose branches meet in Shortcuts and which describes its residual stream itself."""

    def stream(self) -> Stream: ...


class DecayedBlock:
    """What a decayed block adds to the library's block. kinds: its shortcuts in order, called shortcut1, shortcut2, ...
    parts: every child and parameter that its forward uses; None leaves that unchecked."""

    kinds: ClassVar[tuple[str, ...]] = ("attention", "mlp")
    parts: ClassVar[str | None] = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def branches(self) -> list[Event]:
        """Return the block's part of the residual stream; without it the block can be decayed, but not folded."""
        raise UserError(
            f"{plain_class(type(self)).__name__} can be decayed, but its DecayedBlock does not describe its branches: "
            f"add branches() to fold it or to preserve what it computes."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle a block of `decayed_class` by the two classes that it is composed of."""
        if "composed_of" in vars(type(self)):
            return _new_block, type(self).composed_of, self.__getstate__()  # type: ignore[attr-defined]
        return super().__reduce_ex__(protocol)


@cache
def decayed_class(decayed: type, plain: type) -> type:
    """Return the class of a decayed block: the registered forward on top of the library's class."""
    bases = (decayed, plain)
    return type(f"Decayed{plain.__name__}", bases, {"__module__": decayed.__module__, "composed_of": bases})


def _new_block(decayed: type, plain: type) -> Any:
    made: Any = decayed_class(decayed, plain)
    return made.__new__(made)


def plain_class(decayed: type) -> type:
    return decayed.__bases__[-1]


def class_path(kind: type) -> str:
    """Return such as "timm.layers.mlp.Mlp"."""
    return f"{kind.__module__}.{kind.__qualname__}"


# ---- registration: by class, or by its path where the library must not be imported

Kind = type | str
Value = TypeVar("Value")
StreamOf = Callable[[Any], Stream]

_decayed: dict[Kind, type] = {}
_streams: dict[Kind, StreamOf] = {}
_kept_plain: dict[Kind, bool] = {}
_refusals: dict[Kind, str] = {}
_preparations: dict[Kind, Callable[[Any], None]] = {}


def _lookup(table: dict[Kind, Value], kind: type) -> Value | None:
    return table.get(kind, table.get(class_path(kind)))


def register(decayed: type) -> type:
    """Register a subclass of (DecayedBlock, the block's class) whose forward uses its shortcuts. A decorator."""
    if not (issubclass(decayed, DecayedBlock) and issubclass(decayed, nn.Module)):
        raise UserError(
            f"{decayed.__name__} must derive from anechoic.surgery.DecayedBlock and then from the block class it "
            f"replaces."
        )
    _decayed[plain_class(decayed)] = decayed
    return decayed


def replaces(*paths: str) -> Callable[[type], type]:
    """Register a DecayedBlock for the block classes of these paths, such as "timm.models.beit.Block"."""

    def decorate(decayed: type) -> type:
        _decayed.update(dict.fromkeys(paths, decayed))
        return decayed

    return decorate


def describe(model_class: Kind, stream: StreamOf) -> None:
    """Register what surrounds the blocks of a model: stream(model) lists its residual stream from start to end."""
    _streams[model_class] = stream


def keep_plain(module_class: Kind) -> None:
    """Leave the blocks inside this module plain."""
    _kept_plain[module_class] = True


def refuse(module_class: Kind, reason: str) -> None:
    """Refuse a module that looks decayable and is not; the reason completes a sentence that starts with its name."""
    _refusals[module_class] = reason


def prepare(module_class: Kind, edit: Callable[[Any], None]) -> None:
    """Register an edit to make on a module whose blocks change their class."""
    _preparations[module_class] = edit


# ---- what streams have in common


def through(blocks: Iterable[Any]) -> list[Event]:
    """Return the branches of joined blocks, in order."""
    return [event for block in blocks for event in block.branches()]


def stream_to(blocks: Iterable[Any], norm: nn.Module | None) -> Stream:
    """Return the stream through these blocks that a final norm reads, or nothing that is known."""
    events = through(blocks)
    return Stream(tuple(events), ends_raw=True) if norm is None else Stream((*events, Read(norms=(norm,))), False)


def pre_norm(block: Any, *norms_and_writers: tuple[nn.Module, nn.Module]) -> list[Event]:
    """Return one branch per (norm that reads the stream, last affine map)."""
    shortcuts = _shortcuts_in(block)
    return [
        Branch(shortcut, Read(norms=(norm,)), writer)
        for shortcut, (norm, writer) in zip(shortcuts, norms_and_writers, strict=True)
    ]


def projection_of(downsample: nn.Module | None) -> tuple[Slot, nn.Module] | None:
    """Return the convolution that reads the stream and the norm that writes it, on a shortcut that changes shape."""
    if downsample is None:
        return None
    layers = [layer for layer in downsample.modules() if list(layer.parameters(recurse=False))]
    if len(layers) != 2 or not isinstance(layers[0], nn.Conv2d) or layers[0].bias is not None:
        raise UserError("This ResNet's projection is not a convolution and a norm: it can be decayed, but not folded.")
    return Slot(layers[0], "weight"), layers[1]


def resnet_stream(model: Any) -> Stream:
    """ReLU, pooling and batch norms inside branches let a positive factor through, so stem and classifier carry it."""
    events = through(block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage)
    if isinstance(model.fc, nn.Linear | nn.Conv2d):
        return Stream((*events, Read(maps=(Slot(model.fc, "weight"),))), ends_raw=False)
    return Stream((Write(weight_and_bias(model.bn1)), *events), ends_raw=True)


# ---- finding and joining


@dataclass(frozen=True)
class ResidualStream:
    """A residual stream in a model: the module it runs through, its shortcuts in order, and its full description."""

    module: nn.Module
    shortcuts: list[Shortcut]
    describe: Callable[[], Stream]


def join_blocks(model: nn.Module) -> list[ResidualStream]:
    """Exchange the class of every known block of the model, in place, and return the residual streams."""
    for package in ADAPTERS.keys() & {type(module).__module__.partition(".")[0] for module in model.modules()}:
        ADAPTERS[package].load()
    for module in list(_blocks(model)):
        if edit := _lookup(_preparations, type(module)):
            edit(module)
        if decayed := _lookup(_decayed, type(module)):
            _join_block(module, decayed)
    _check_each_runs_once(model)
    return find(model)


def _check_each_runs_once(model: nn.Module) -> None:
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DecayedBlock) and id(module) in names:
            raise UserError(
                f"{names[id(module)]} and {name} are the same block, and a shortcut has one alpha: use a separate copy "
                f"for each."
            )
        names[id(module)] = name


def release(model: nn.Module) -> None:
    """Return every block to the library's class, in place. Its shortcuts must be plain."""
    for module in list(model.modules()):
        if isinstance(module, DecayedBlock):
            for name in _shortcut_names(module):
                assert getattr(module, name).factors == (1.0, 1.0), "only plain shortcuts can be written x + f(x)"
                delattr(module, name)
            module.__class__ = plain_class(type(module))


def find(model: nn.Module) -> list[ResidualStream]:
    """Return the residual streams of a joined model, in the order of its modules."""
    found: list[ResidualStream] = []
    loose: list[Any] = []
    for module in _outermost(model):
        if isinstance(module, DecayedBlock):
            loose.append(module)
        else:
            found.append(ResidualStream(module, _shortcuts_in(module), partial(_describe, module)))
    if loose:
        # Blocks of a model without a description: their order is that of its modules, their surroundings are unknown.
        shortcuts = [shortcut for block in loose for shortcut in _shortcuts_in(block)]
        found.append(ResidualStream(model, shortcuts, lambda: stream_to(loose, None)))
    return [stream for stream in found if stream.shortcuts]


def _describe(module: Any) -> Stream:
    stream = _lookup(_streams, type(module))
    return module.stream() if stream is None else stream(module)


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules that are described or describe themselves and, outside of them, decayed blocks."""
    describes = isinstance(model, DescribesStream) and any(isinstance(module, Shortcut) for module in model.modules())
    if isinstance(model, DecayedBlock) or describes or _lookup(_streams, type(model)) is not None:
        yield model
    elif not _lookup(_kept_plain, type(model)):
        for child in model.children():
            yield from _outermost(child)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module that may change, outermost first; refuse unknown subclasses of known blocks."""
    kind = type(model)
    if reason := _lookup(_refusals, kind):
        raise UserError(f"{kind.__name__} is not supported: {reason}; decay the parts you mean one by one.")
    if not _lookup(_decayed, kind) and not isinstance(model, DecayedBlock):
        for known in kind.__mro__:
            if _lookup(_decayed, known):
                raise UserError(
                    f"{kind.__name__} derives from {class_path(known)}, but its forward may differ: register a "
                    f"DecayedBlock for it with anechoic.surgery.register."
                )
    if not _lookup(_kept_plain, kind):
        yield model
        for child in model.children():
            yield from _blocks(child)


def _join_block(block: Any, decayed: Any) -> None:
    kind: Any = type(block)
    _check_parts(block, decayed.parts)
    block.__class__ = decayed if issubclass(decayed, nn.Module) else decayed_class(decayed, kind)
    for name, kind in zip(_shortcut_names(block), block.kinds, strict=True):
        block.add_module(name, Shortcut(kind=kind))


def _check_parts(block: nn.Module, parts: str | None) -> None:
    own = {name for name, _ in block.named_children()} | {name for name, _ in block.named_parameters(recurse=False)}
    unknown = sorted(own - set(parts.split())) if parts is not None else []
    if unknown:
        library = type(block).__module__.partition(".")[0]
        raise UserError(
            f"{class_path(type(block))} has unknown parts ({', '.join(unknown)}): install the version of {library} "
            f"named in docs/your-model.md, or register a DecayedBlock of your own."
        )


def _shortcut_names(block: Any) -> list[str]:
    return [f"shortcut{i + 1}" for i in range(len(block.kinds))]


def _shortcuts_in(module: nn.Module) -> list[Shortcut]:
    """Return the shortcuts in execution order: as the module describes them, or those of its blocks."""
    if isinstance(module, DecayedBlock):
        return [getattr(module, name) for name in _shortcut_names(module)]
    if not _lookup(_streams, type(module)):
        return _describe(module).shortcuts
    blocks = [block for block in module.modules() if isinstance(block, DecayedBlock)]
    return [shortcut for block in blocks for shortcut in _shortcuts_in(block)]
