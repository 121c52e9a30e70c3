"""A pack: R copies of one model, trained together, with every trained tensor stacked along a leading trials axis.

All parameters live in one flat tensor (R, P) and all clipped sums in another. So noise and updates are single
operations for every model. Leaf layers are replaced by their clipping rules (`engine/layers/`). Modules without trained
parameters are used unchanged. Modules that are known to mix examples are refused by name; `independence.py` tests for
models that mix examples by other means.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpsgd_cli.engine.layers import RULES, Fallback, Layer, Ruled, Session
from dpsgd_cli.engine.pooling import vectorised
from dpsgd_cli.engine.precision import MOST_FLOAT32, PRECISION
from dpsgd_cli.errors import ModelError

_MIXERS = (nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._LazyNormBase)
_LAZY = nn.modules.lazy.LazyModuleMixin
_DROPOUT = nn.modules.dropout._DropoutNd
_RANDOM = (_DROPOUT, nn.RReLU)
# these read attributes of their parts, which only the original parts have
_WHOLE = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_SEVERAL: dict[tuple[type[nn.Module], ...], str] = {
    (nn.RNNBase, nn.RNNCellBase): "LSTM or GRU of dpsgd_cli.engine.layers, which are made of dense layers",
    (nn.MultiheadAttention,): "nn.TransformerEncoderLayer, or attention made of dense layers",
    (nn.Transformer, nn.TransformerDecoder, nn.TransformerDecoderLayer): "nn.TransformerEncoder",
    (nn.Bilinear,): "products of dense layers",
}
"""Modules that take or return several tensors, with what to use instead."""
_INSTANCE = nn.modules.instancenorm._InstanceNorm


@dataclass(frozen=True)
class Placement:
    """Device and dtype of the tensors."""

    device: torch.device
    dtype: torch.dtype = torch.float32


class Pack(nn.Module):
    """R trials of the model that `build` returns; trial i is initialised under torch seed `seeds[i]`.

    `values` and `sums` have shape (R, P), with P = `size`. `sums` is float64; its products have dtype `products`
    (`precision.py`). `layers` are the clipping groups, in order of registration. `shares_input`: the model applies its
    first layer directly to the input, so all trials can share one (B, ...) input without copies.
    """

    def __init__(
        self, build: Callable[[], nn.Module], seeds: Sequence[int], place: Placement, shares_input: bool = False
    ) -> None:
        super().__init__()
        self.seeds = tuple(seeds)
        self.trials = len(seeds)
        self.rounded_products = False
        self.products = place.dtype
        self._rounded: Tensor | None = None
        self._views: dict[bool, dict[int, dict[str, Tensor]]] = {}
        self.shares_input = shares_input
        sources = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                sources.append(build().to(device=place.device, dtype=place.dtype))
        anchor = torch.zeros((), device=place.device, dtype=place.dtype, requires_grad=True)
        self.session = Session(self.trials, anchor)
        self.layers: list[Layer] = []
        self.template = self._pack(sources[0])
        self.layers = list(dict.fromkeys(m for m in self.template.modules() if isinstance(m, Layer)))
        if not self.layers:
            raise ModelError("the model has no trainable parameters")
        self._constants = _constants(sources)
        self.untrained = {name: x.detach().clone() for name, x in self._constants.items()}
        self._places = {id(layer): name for name, layer in self.template.named_modules() if isinstance(layer, Layer)}
        self._bind(sources, place)

    def _pack(self, source: nn.Module) -> nn.Module:
        _refuse_tied(source)
        packed: dict[int, nn.Module] = {}

        def walk(module: nn.Module, name: str) -> nn.Module:
            if id(module) not in packed:
                packed[id(module)] = self._replace(module, name, walk)
            return packed[id(module)]

        return walk(source, "")

    def _replace(self, module: nn.Module, name: str, walk: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
        rule = rule_for(module, name)
        if rule is not None:
            return rule(module, self.session)
        if isinstance(module, _DROPOUT):
            return nn.Identity()
        if not any(p.requires_grad for p in module.parameters()):
            return vectorised(module, self.session) or module
        clone = copy.copy(module)
        clone._modules = {
            key: None if child is None else walk(child, f"{name}.{key}".strip("."))
            for key, child in module._modules.items()
        }
        return clone

    def _bind(self, sources: Sequence[nn.Module], place: Placement) -> None:
        stacked = [dict(source.named_parameters()) for source in sources]
        groups = [(group, self._name(layer, own)) for group, layer in enumerate(self.layers) for own in layer.names]
        self.size = total = sum(stacked[0][name].numel() for _, name in groups)
        self.values = torch.empty(self.trials, total, device=place.device, dtype=place.dtype)
        self.sums = torch.zeros_like(self.values, dtype=PRECISION)
        self.spans: dict[str, tuple[int, torch.Size]] = {}
        self.group_of = torch.empty(total, dtype=torch.long, device=place.device)
        offset = 0
        for group, name in groups:
            shape = stacked[0][name].shape
            stop = offset + shape.numel()
            for trial, parameters in enumerate(stacked):
                self.values[trial, offset:stop] = parameters[name].detach().reshape(-1)
            self.spans[name] = (offset, shape)
            self.group_of[offset:stop] = group
            offset = stop
        self._attach(self.values, self.sums)

    def _attach(self, values: Tensor, sums: Tensor) -> None:
        for layer in self.layers:
            layer.bind(self._views_of(values, layer), self._views_of(sums, layer))

    def _name(self, layer: Layer, own: str) -> str:
        return f"{self._places[id(layer)]}.{own}".strip(".")

    @property
    def layer_names(self) -> list[str]:
        """Names of `layers` within the model."""
        return [self._places[id(layer)] for layer in self.layers]

    def require_untrained_kept(self) -> None:
        """Raise ModelError if a buffer or frozen parameter differs from the one that the model was built with."""
        now = self._constants | dict(self.template.named_buffers())
        for name, was in self.untrained.items():
            if was.shape != now[name].shape or not torch.equal(was.nan_to_num(), now[name].nan_to_num()):
                raise ModelError(
                    f"{name} changed in training, which nothing clips and no noise hides; no result is written. Keep"
                    " nothing of what the model sees"
                )

    def _views_of(self, flat: Tensor, layer: Layer) -> dict[str, Tensor]:
        """Return views of `flat` (R, P) for each parameter of a layer, shape (R, *shape)."""
        found = {}
        for name in layer.names:
            offset, shape = self.spans[self._name(layer, name)]
            found[name] = flat[:, offset : offset + shape.numel()].view(self.trials, *shape)
        return found

    def expect(self, records: int) -> None:
        """Set the dtype of products for steps of about `records` (public) records a trial, see `precision.py`."""
        self.products = PRECISION if records > MOST_FLOAT32 else self.values.dtype

    @contextmanager
    def in_products(self) -> Iterator[torch.dtype]:
        """Make layers return recorded tensors in the dtype of products while the context lasts."""
        self.session.exact = self.products
        try:
            yield self.products
        finally:
            self.session.exact = self.values.dtype

    @contextmanager
    def traced_on(self, values: Tensor, sums: Tensor) -> Iterator[None]:
        """Make steps read `values` and add to `sums`, both (R, P), without reading any number on the host.

        The change lasts as long as the context.
        """
        self.session.tracing = True
        # kept rather than made again afterwards: a tracer would build the new views from its own tensors
        anchor, kept = self.session.anchor, [(layer.values, layer.sums) for layer in self.layers]
        self._attach(values, sums)
        try:
            yield
        finally:
            self.session.tracing = False
            self.session.anchor = anchor
            for layer, views in zip(self.layers, kept, strict=True):
                layer.forget()
                layer.bind(*views)

    def work_in(self, dtype: torch.dtype | None, rounded_products: bool = False) -> None:
        """Set recorded passes to `dtype` (None: that of the parameters), or to rounded products (`precision.py`).

        Raises ModelError if a layer has no rule for passes in `dtype`.
        """
        self.rounded_products = rounded_products
        self.session.rounds = rounded_products or dtype is not None
        if dtype is None:
            return
        for layer in self.layers:
            if not layer.rounds:
                raise ModelError(
                    f"runtime.dtype {str(dtype).removeprefix('torch.')}: {self._places[id(layer)] or 'the model'}"
                    f" ({type(layer).__name__}) has no rule for rounded passes; use float32 or tf32"
                )
        self._rounded = self.values.to(dtype)
        exact = {id(layer): layer.values for layer in self.layers}
        rounded = {id(layer): self._views_of(self._rounded, layer) for layer in self.layers}
        self._views = {False: exact, True: rounded}

    def _take_parameters(self, x: Tensor) -> Tensor:
        """Bind rounded parameters for a recorded pass and exact ones for others; return `x` in their dtype."""
        if self._rounded is None:
            return x
        recording = self.session.recording
        if recording:
            self._rounded.copy_(self.values)
        for layer in self.layers:
            layer.values = self._views[recording][id(layer)]
        return x.to(self._rounded.dtype) if recording and x.is_floating_point() else x

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (R, B, K) for inputs (R, B, ...), or for (1, B, ...) that all trials share."""
        rows = x.shape[1]
        self.session.rows = rows
        if x.shape[0] != self.trials and not self.shares_input:
            x = x.expand(self.trials, *x.shape[1:])
        y = self.template(self._take_parameters(x.reshape(x.shape[0] * rows, *x.shape[2:])))
        return y.reshape(self.trials, rows, *y.shape[1:]).to(self.values.dtype)


def rule_for(module: nn.Module, name: str) -> type[Layer] | None:
    """Return the rule that clips `module`, or None if it has no trained parameters or its parts have their own rules.

    `name` is the module's name in messages. Raises ModelError for a module that cannot be trained privately.
    """
    told = f"layer {name!r}" if name else "the model"
    _refuse(module, told)
    if not any(p.requires_grad for p in module.parameters()):
        _refuse_inside(module, name)
        return None
    if isinstance(module, Ruled):
        return module.rule
    for rule in RULES:
        if rule.accepts(module):
            return rule
    _refuse_several(module, told)
    if any(True for _ in module.parameters(recurse=False)) or not list(module.children()) or isinstance(module, _WHOLE):
        _refuse_inside(module, name)
        return Fallback
    return None


def _refuse(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, _MIXERS) and not _is_constant(module, name):
        raise ModelError(
            f"{name}: {kind} mixes the examples of a batch, so no record's influence can be bounded;"
            " use GroupNorm or LayerNorm instead"
        )
    _refuse_unfinished(module, name)
    if isinstance(module, _INSTANCE) and module.track_running_stats:
        raise ModelError(f"{name}: {kind} with track_running_stats keeps statistics of the data; leave it off")
    if isinstance(module, _RANDOM) and getattr(module, "p", None) != 0:
        raise ModelError(f"{name}: {kind} draws from a stream that no seed of a trial controls; leave it out")


def refuse_unfinished(module: nn.Module) -> None:
    """Raise ModelError if a layer has no sizes yet (lazy) or is hidden by a compiler."""
    for name, inner in module.named_modules():
        _refuse_unfinished(inner, f"layer {name!r}" if name else "the model")


def _refuse_unfinished(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, _LAZY):
        raise ModelError(f"{name}: {kind} learns its sizes from data that it sees; give them")
    compiled = kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    if compiled or isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{name}: {kind} is compiled, which hides the layers whose gradients are clipped; build it without"
            " torch.compile and torch.jit, and set runtime.compile: true where steps should be compiled"
        )


def _is_constant(module: nn.modules.batchnorm._NormBase, name: str) -> bool:
    """Return True if batch normalisation is a fixed map of each example: eval mode, stored statistics, all frozen.

    This package never calls `train()` on a model, and `state.py` detects a model that calls it itself. Raises
    ModelError for eval mode with trained parameters.
    """
    if module.training or module.running_mean is None or module.running_var is None:
        return False
    if any(p.requires_grad for p in module.parameters()):
        raise ModelError(
            f"{name}: {type(module).__name__} in eval mode keeps examples apart, but its trained weight and bias have"
            " no rule; freeze them by requires_grad_(False), or use GroupNorm or LayerNorm"
        )
    return True


def _refuse_several(module: nn.Module, name: str) -> None:
    """Raise ModelError for modules with several inputs or outputs, and for encoders without `batch_first`."""
    kind = type(module).__name__
    for several, instead in _SEVERAL.items():
        if isinstance(module, several):
            raise ModelError(
                f"{name}: {kind} takes or returns several tensors, and the gradient of one example is known of layers"
                f" that take and return one; use {instead}"
            )
    if isinstance(module, _WHOLE) and not all(m.batch_first for m in module.modules() if hasattr(m, "batch_first")):
        raise ModelError(f"{name}: {kind} takes examples for places of a sequence; give batch_first=True")


def _refuse_inside(module: nn.Module, name: str) -> None:
    for inner_name, inner in module.named_modules():
        full = f"{name}.{inner_name}".strip(".")
        _refuse(inner, f"layer {full!r}" if full else "the model")


def _refuse_tied(source: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, module in source.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{own}".strip(".")
            if id(parameter) in owners:
                raise ModelError(f"{full} is the same tensor as {owners[id(parameter)]}; tied weights have no rule yet")
            owners[id(parameter)] = full


def _constants(sources: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return buffers and frozen parameters by name.

    Trials share them, so they must be equal under every seed; raises ModelError if they differ.
    """
    constants = [
        {name: p for name, p in source.named_parameters() if not p.requires_grad} | dict(source.named_buffers())
        for source in sources
    ]
    for name, shared in constants[0].items():
        if any(not torch.equal(shared, others[name]) for others in constants[1:]):
            raise ModelError(
                f"{name} is not trained and differs from seed to seed, but trials that train together share it;"
                " fill it from a torch.Generator with a seed of its own, and name it in model.weights.constant"
            )
    return constants[0]


def elements_per_row(pack: Pack, x: Tensor) -> int:
    """Estimate how many numbers a step holds per row and trial, by a pass over a few rows `x` (B, ...)."""
    return max(1, sum(elements_by_layer(pack, x).values()))


def elements_by_layer(pack: Pack, x: Tensor) -> dict[str, int]:
    """Estimate how many numbers each layer (by name) holds per row and trial, by a pass over rows `x` (B, ...)."""
    counted = dict.fromkeys(pack.layer_names, 0)

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found = inputs[0].numel() // inputs[0].shape[0] + 3 * (output.numel() // output.shape[0])
        if isinstance(layer, Layer) and layer.holds_gradients:
            found += sum(value[0].numel() for value in layer.values.values())
        counted[names[id(layer)]] += found

    names = dict(zip(map(id, pack.layers), pack.layer_names, strict=True))
    hooks = [layer.register_forward_hook(count) for layer in pack.layers]
    try:
        with torch.no_grad():
            pack(x[None])
    finally:
        for hook in hooks:
            hook.remove()
    return counted


@dataclass(frozen=True)
class LayerReport:
    """One layer with trained parameters: its rule and method of clipping, or the reason for refusal."""

    name: str
    kind: str
    parameters: int
    rule: str | None = None
    clipped: str = ""
    refused: str | None = None


def layer_reports(module: nn.Module, name: str = "") -> list[LayerReport]:
    """Return a report for each layer of a model, in order; every refused layer is listed, not only the first."""
    kind = type(module).__name__
    size = sum(p.numel() for p in module.parameters() if p.requires_grad and not nn.parameter.is_lazy(p))
    try:
        rule = rule_for(module, name)
    except ModelError as error:
        return [LayerReport(name, kind, size, refused=str(error))]
    if rule is not None:
        return [LayerReport(name, kind, size, rule.__name__, rule.clipped)]
    return [
        found for own, child in module.named_children() for found in layer_reports(child, f"{name}.{own}".strip("."))
    ]
