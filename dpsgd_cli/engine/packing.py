"""A pack: R copies of one model, trained together, with every trained tensor stacked along a leading trials axis.

All parameters live in one flat tensor (R, P) and all clipped sums in another. So noise and updates are single
operations for every model. Layers are replaced by their clipping rules (`engine/layers/`); the code of other modules
runs on one example at a time (`apart.py`), and their own parameters have a rule, too. Modules that are known to mix
examples are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from dpsgd_cli.engine.apart import HOOKED
from dpsgd_cli.engine.layers import RULES, Described, Layer, Own, Ruled, Session, Tied, rewritten
from dpsgd_cli.engine.layers.linear import Linear
from dpsgd_cli.engine.precision import MOST_FLOAT32, PRECISION
from dpsgd_cli.engine.weights import seeded
from dpsgd_cli.errors import ModelError

_MIXERS = (nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._LazyNormBase)
_LAZY = nn.modules.lazy.LazyModuleMixin
_RANDOM = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_INSTANCE = nn.modules.instancenorm._InstanceNorm


@dataclass(frozen=True)
class Placement:
    """Device and dtype of the tensors."""

    device: torch.device
    dtype: torch.dtype = torch.float32


class Wrapper(nn.Module):
    """A module around a model that prepares all rows at once, which an audit adds; the `model` then sees each alone."""

    model: nn.Module

    def prepared(self, x: Tensor) -> Tensor:
        """Return rows (N, ...) in the same order."""
        raise NotImplementedError


class Pack(nn.Module):
    """R trials of the model that `build` returns; trial i is initialised under torch seed `seeds[i]`.

    `values` and `sums` have shape (R, P), with P = `size`. `sums` is float64; its products have dtype `products`
    (`precision.py`). `members` are the rules in order of registration; `layers` are the clipping groups: a rule, or
    several that share weights. `trusted`: every module of the model keeps the rows of a batch apart, is known to, and
    has a rule, as the built-in models; so it runs on whole batches, and all trials can share one (B, ...) input without
    copies. The code of any other model runs on one example at a time (`apart.py`). `charged_norms`: the L2 norm of one
    example's part of a sum that each trial's noise is charged for, where a method of a user's own runs.
    """

    def __init__(
        self, build: Callable[[], nn.Module], seeds: Sequence[int], place: Placement, trusted: bool = False
    ) -> None:
        super().__init__()
        self.seeds = tuple(seeds)
        self.trials = len(seeds)
        self.rounded_products = False
        self.products = place.dtype
        self._rounded: Tensor | None = None
        self._exact = torch.empty(0)
        self._views: dict[bool, dict[int, dict[str, Tensor]]] = {}
        self._seen: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []
        self.trusted = trusted
        self.charged_norms: list[float] | None = None
        self.build = build
        sources = []
        for seed in seeds:
            made = seeded(build, seed)
            for name, p in made.named_parameters():
                if p.is_complex():
                    raise ModelError(f"{name} is complex; keep a real parameter (..., 2) and use torch.view_as_complex")
            sources.append(made.to(device=place.device, dtype=place.dtype))
        anchor = torch.zeros((), device=place.device, dtype=place.dtype, requires_grad=True)
        self.session = Session(self.trials, anchor)
        self.members: list[Layer] = []
        self._places: dict[int, str] = {}
        self._beside: dict[nn.Module, Own] = {}
        self.template = self._packed(sources[0])
        if not self.members:
            raise ModelError("the model has no trainable parameters")
        self._names = {id(p): name for name, p in sources[0].named_parameters()}
        order = {name: place for place, name in enumerate(self._names.values())}
        self.members.sort(key=lambda one: min(order[self._names[id(p)]] for p in one.parameters_of.values()))
        self._check_all_taken(sources[0])
        self._constants = _constants(sources)
        self.untrained = {name: x.detach().clone() for name, x in self._constants.items()}
        self.layers = self._groups()
        self._bind(sources, place)
        self.raw = [p for p in sources[0].parameters() if p.requires_grad]

    def _packed(self, source: nn.Module) -> nn.Module:
        # modules are kept, so that no other module gets the same id
        packed: dict[int, tuple[nn.Module, nn.Module]] = {}

        def walk(module: nn.Module, name: str) -> nn.Module:
            if id(module) not in packed:
                packed[id(module)] = module, self._replace(module, name, walk)
            return packed[id(module)][1]

        return walk(source, "")

    def _replace(self, module: nn.Module, name: str, walk: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
        rule = rule_for(module, name)
        if rule is not None:
            layer = self._taken(rule(module, self.session), name)
            for key, described in {} if self.trusted else layer._parameters.items():
                if isinstance(described, Described):
                    described.lend = partial(self._lent, module, name, key)
            return layer
        if isinstance(module, Ruled) or (self.trusted and _has_own(module)):
            raise ModelError(f"{_told(name)}: {type(module).__name__} has no rule")
        made = rewritten(module)
        clone = _cloned(module) if made is None else made
        _refuse_aside(module, name)
        clone._modules = {
            key: None if child is None else walk(child, f"{name}.{key}".strip("."))
            for key, child in clone._modules.items()
        }
        if made is None and _has_own(module):
            own = Own(module, self.session, clone)
            for layer in (own, *(product for products in own.products.values() for product in products.values())):
                self._taken(layer, name)
        return clone

    def _taken(self, layer: Layer, name: str) -> Layer:
        self.members.append(layer)
        self._places[id(layer)] = name
        return layer

    def _lent(self, source: nn.Module, name: str, key: str) -> Tensor | None:
        """Return one example's copy of parameter `key` of a layer that has a rule, for code that uses it by itself.

        The first use makes the copies' rule, and joins it with that of the layer: both add up to one gradient
        (`tied.py`), and are one clipping group as before. Returns None outside of a pass.
        """
        if self.session.passes.level is None:
            return None
        if source not in self._beside:
            with self.session.passes.outside():
                made = self._beside[source] = Own(source, self.session, nn.Module())
            for one in (made, *(product for products in made.products.values() for product in products.values())):
                self._taken(one, name)
                one.bind(self._views_of(self.values, one), self._views_of(self.sums, one))
            self.layers[:] = self._groups()
            made.lend()
        lent: Tensor = vars(self._beside[source].clone[0])[key]
        return lent

    def _check_all_taken(self, source: nn.Module) -> None:
        """Raise ModelError unless each trained parameter belongs to a rule."""
        taken = {id(p) for layer in self.members for p in layer.parameters_of.values()}
        for name, p in source.named_parameters():
            if p.requires_grad and id(p) not in taken:
                raise ModelError(f"{name} is trained, but belongs to no layer that has a rule; freeze it")

    def _groups(self) -> list[Layer | Tied]:
        """Return the clipping groups: each rule, or all that share weights, in place of the first of them."""
        holders: dict[str, list[tuple[Layer, str]]] = {}
        for layer in self.members:
            for own, p in layer.parameters_of.items():
                holders.setdefault(self._names[id(p)], []).append((layer, own))
        group = {id(layer): id(layer) for layer in self.members}
        for held in holders.values():
            joined = {group[id(layer)] for layer, _ in held}
            group = {one: min(joined) if of in joined else of for one, of in group.items()}
        found: list[Layer | Tied] = []
        for mark in dict.fromkeys(group.values()):
            members = [layer for layer in self.members if group[id(layer)] == mark]
            shared = [held for held in holders.values() if group[id(held[0][0])] == mark]
            alone = len(members) == 1 and all(len(held) == 1 for held in shared)
            found.append(members[0] if alone else Tied(members, shared))
        return found

    def _bind(self, sources: Sequence[nn.Module], place: Placement) -> None:
        stacked = [dict(source.named_parameters()) for source in sources]
        groups: dict[str, int] = {}
        for number, group in enumerate(self.layers):
            for layer in group.members if isinstance(group, Tied) else [group]:
                groups |= {self._name(layer, own): number for own in layer.names}
        self.size = total = sum(stacked[0][name].numel() for name in groups)
        self.values = torch.empty(self.trials, total, device=place.device, dtype=place.dtype)
        self.sums = torch.zeros_like(self.values, dtype=PRECISION)
        self.spans: dict[str, tuple[int, torch.Size]] = {}
        self.group_of = torch.empty(total, dtype=torch.long, device=place.device)
        offset = 0
        for name in (name for name in self._names.values() if name in groups):
            number = groups[name]
            shape = stacked[0][name].shape
            stop = offset + shape.numel()
            for trial, parameters in enumerate(stacked):
                self.values[trial, offset:stop] = parameters[name].detach().reshape(-1)
            self.spans[name] = (offset, shape)
            self.group_of[offset:stop] = number
            offset = stop
        self._attach(self.values, self.sums)

    def _attach(self, values: Tensor, sums: Tensor) -> None:
        for layer in self.members:
            layer.bind(self._views_of(values, layer), self._views_of(sums, layer))

    def _name(self, layer: Layer, own: str) -> str:
        return self._names[id(layer.parameters_of[own])]

    @property
    def linear(self) -> Linear | None:
        """The layer of a built-in model that is one linear layer of the flattened input; None for other models."""
        only = self.members[0]
        return only if self.trusted and len(self.members) == 1 and isinstance(only, Linear) else None

    @property
    def member_names(self) -> list[str]:
        """Names of `members` within the model."""
        return [self._places[id(layer)] for layer in self.members]

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
        anchor, kept = self.session.anchor, [layer.bound for layer in self.members]
        rounded = self._exact, self._rounded, self._views
        self._attach(values, sums)
        if self._rounded is not None:
            self._round(values, self._rounded.dtype)
        try:
            yield
        finally:
            self.session.tracing = False
            self.session.anchor = anchor
            self._exact, self._rounded, self._views = rounded
            for layer, views in zip(self.members, kept, strict=True):
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
        for layer in self.members:
            if not layer.rounds:
                raise ModelError(
                    f"runtime.dtype {str(dtype).removeprefix('torch.')}: {self._places[id(layer)] or 'the model'}"
                    f" ({type(layer).__name__}) has no rule for rounded passes; use float32 or tf32"
                )
        self._round(self.values, dtype)
        # what a module's own code sees of its parameters: frozen ones, and descriptions of trained ones
        self._seen = [
            (module._parameters, name, p, _rounded(p, dtype))
            for module in self.template.modules()
            for name, p in module._parameters.items()
            if p is not None and p.is_floating_point()
        ]

    def _round(self, values: Tensor, dtype: torch.dtype) -> None:
        """Keep room for `values` (R, P), to which layers are bound, rounded to `dtype`, and views of both."""
        self._exact, self._rounded = values, values.to(dtype)
        exact = {id(layer): layer.bound[0] for layer in self.members}
        rounded = {id(layer): self._views_of(self._rounded, layer) for layer in self.members}
        self._views = {False: exact, True: rounded}

    def _take_parameters(self, x: Tensor) -> Tensor:
        """Bind rounded parameters for a recorded pass and exact ones for others; return `x` in their dtype."""
        if self._rounded is None:
            return x
        recording = self.session.recording
        if recording:
            self._rounded.copy_(self._exact)
        for parameters, name, exact, rounded in self._seen:
            parameters[name] = rounded if recording else exact
        for layer in self.members:
            layer.values = layer.turned(self._views[recording][id(layer)])
        keeps = getattr(self.template, "takes_exact_rows", False)
        return x.to(self._rounded.dtype) if recording and x.is_floating_point() and not keeps else x

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (R, B, K) for inputs (R, B, ...), or for (1, B, ...) that all trials share."""
        rows, passes = x.shape[1], self.session.passes
        self.session.rows = rows
        if x.shape[0] != self.trials and not self.trusted:
            x = x.expand(self.trials, *x.shape[1:])
        flat = self._take_parameters(x.reshape(x.shape[0] * rows, *x.shape[2:]))
        model = self.template
        if isinstance(model, Wrapper):
            flat, model = model.prepared(flat), model.model
        if self.trusted:
            y = model(flat)
        else:
            bound = next(iter(self.members[0].values.values()))  # a view, which counts the changes of all values
            version = bound._version
            with passes.masks.pass_of(flat, self.trials, self.session.copies, self.session.recording):
                y = passes.run(model, flat)
            if bound._version != version:
                raise ModelError(
                    "the model changes a trained parameter in place, as a moving average or a projection does; nothing"
                    " clips what is written, and no noise hides it; leave it out, or compute with a copy (`.clone()`)"
                )
        return y.reshape(self.trials, rows, *y.shape[1:]).to(self.values.dtype)


def _told(name: str) -> str:
    return f"layer {name!r}" if name else "the model"


def _cloned(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same attributes; `copy.copy` fails for parametrised modules."""
    clone = type(module).__new__(type(module))
    clone.__dict__ = dict(module.__dict__)
    if isinstance(clone, nn.TransformerEncoder):
        clone.use_nested_tensor = False  # which holds rows of several lengths
    return clone


def _rounded(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if isinstance(parameter, Described):
        return parameter.of_dtype(dtype)  # type: ignore[return-value]
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=False)


def _has_own(module: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def rule_for(module: nn.Module, name: str) -> type[Layer] | None:
    """Return the rule that replaces `module` whole, or None if its code runs and its parts are looked at.

    `name` is the module's name in messages. Raises ModelError for a module that cannot be trained privately.
    """
    _refuse(module, _told(name))
    if not any(p.requires_grad for p in module.parameters()):
        return None
    if isinstance(module, Ruled):
        return module.rule
    return next((rule for rule in RULES if rule.accepts(module)), None)


def _refuse(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, _MIXERS) and not _is_constant(module):
        raise ModelError(
            f"{name}: {kind} mixes the examples of a batch, so no record's influence can be bounded;"
            " use GroupNorm or LayerNorm, or its stored statistics: .eval() in the code that builds it"
        )
    _refuse_unfinished(module, name)
    _refuse_hooks(module, name)
    if isinstance(module, _INSTANCE) and module.track_running_stats:
        raise ModelError(f"{name}: {kind} with track_running_stats keeps statistics of the data; leave it off")
    if isinstance(module, _RANDOM):
        raise ModelError(f"{name}: {kind} draws from a stream that no seed of a trial controls; leave it out")


def _refuse_hooks(module: nn.Module, name: str) -> None:
    """Raise ModelError for hooks of gradients, which no rule would call."""
    every = nn.modules.module
    hooks = (module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or every._global_backward_hooks or every._global_backward_pre_hooks:
        raise ModelError(f"{name}: {HOOKED}; remove the backward hook and write the change into forward()")
    for own, p in module._parameters.items():
        if p is not None and (p._backward_hooks or p._post_accumulate_grad_hooks):
            raise ModelError(
                f"{name}: {own} has a hook: {HOOKED}; to train only a part of it, make that part a parameter and"
                " the rest a buffer, and join them in forward()"
            )


def refuse_unfinished(module: nn.Module) -> None:
    """Raise ModelError if a layer has no sizes yet (lazy), is hidden by a compiler or is normalised by a hook."""
    for name, inner in module.named_modules():
        _refuse_unfinished(inner, f"layer {name!r}" if name else "the model")


def _refuse_unfinished(module: nn.Module, name: str) -> None:
    kind = type(module).__name__
    if isinstance(module, _LAZY):
        raise ModelError(f"{name}: {kind} learns its sizes from data that it sees; give them")
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            raise ModelError(
                f"{name}: {hook.name} is normalised by a hook, which keeps the result after each pass; use"
                " torch.nn.utils.parametrizations.weight_norm, or .spectral_norm and .eval()"
            )
    if isinstance(module, _SpectralNorm) and module.training:
        raise ModelError(
            f"{name}: spectral_norm updates its vectors in each pass in training mode, which nothing clips; call"
            " .eval() on the module in the code that builds it, and they stay as they were drawn"
        )
    compiled = kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    if compiled or isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"{name}: {kind} is compiled, which hides the layers whose gradients are clipped; build it without"
            " torch.compile and torch.jit, and set runtime.compile: true where steps should be compiled"
        )


def _is_constant(module: nn.modules.batchnorm._NormBase) -> bool:
    """Return True if batch normalisation is a map of each example alone: eval mode, by stored and so public statistics.

    This package never calls `train()` on a model, and `independence.py` refuses a model that calls it itself.
    """
    return not module.training and module.running_mean is not None and module.running_var is not None


def _refuse_aside(module: nn.Module, name: str) -> None:
    """Raise ModelError if a module keeps trained parameters in plain attributes, where its code would use them raw."""
    if type(module).__module__.startswith("torch.nn.modules.rnn"):
        return  # its list of all weights is used by its own code only, which does not run
    for own, value in vars(module).items():
        if own in ("_parameters", "_modules", "_buffers"):
            continue
        for part in tree_leaves(value):
            if isinstance(part, nn.Parameter) and part.requires_grad:
                raise ModelError(
                    f"{_told(name)}: {own} keeps a trained parameter outside of torch's registry, where its use cannot"
                    " be seen; keep it as an attribute, or in nn.ParameterList or nn.ParameterDict"
                )


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
    counted = dict.fromkeys(pack.member_names, 0)

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        output = output[0] if isinstance(output, tuple) else output
        found = inputs[0].numel() // inputs[0].shape[0] + 3 * (output.numel() // output.shape[0])
        if isinstance(layer, Layer) and layer.holds_gradients:
            found += sum(value[0].numel() for value in layer.values.values())
        counted[names[id(layer)]] += found

    names = dict(zip(map(id, pack.members), pack.member_names, strict=True))
    for layer in pack.members:
        if isinstance(layer, Own):
            counted[names[id(layer)]] += 2 * sum(value[0].numel() for value in layer.values.values())
    hooks = [layer.register_forward_hook(count) for layer in pack.members]
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
    trained = [p for p in module.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
    size = sum(p.numel() for p in trained)
    try:
        rule = rule_for(module, name)
    except ModelError as error:
        return [LayerReport(name, kind, size, refused=str(error))]
    if rule is not None:
        return [LayerReport(name, kind, size, rule.__name__, rule.clipped)]
    made = rewritten(module) or module
    own = sum(p.numel() for p in made._parameters.values() if p is not None and p.requires_grad)
    found = [LayerReport(name, kind, own, Own.__name__, Own.clipped)] if own else []
    for key, child in made.named_children():
        found += layer_reports(child, f"{name}.{key}".strip("."))
    return found
