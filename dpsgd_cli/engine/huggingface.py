"""Models of transformers from a local folder: weights in safetensors and a configuration; adapters by peft (LoRA).

Nothing is downloaded, no code of the folder is run and no pickle is read. All numbers of the folder are declared public
by the recipe; results name the SHA-256 of each file, and hold the trained tensors alone: with LoRA the adapters and the
head. Layers that the folder lacks (a new head) are drawn from the trial's seed and trained.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsgd_cli.common.text_format import listed, similar
from dpsgd_cli.engine.named_inputs import NamedInputs
from dpsgd_cli.engine.settings import HuggingFaceModel, Lora
from dpsgd_cli.errors import DataError, ModelError, UsageError

CLASSES = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}
"""Class of transformers for each `model.task`."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


def library(name: str) -> Any:
    """Return the library `transformers` or `peft`; raise UsageError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"model.kind: huggingface needs {name}; run `pip install 'dpsgd[transformers]'`") from None


def configuration(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json. Raises DataError for a folder that has none."""
    if not folder.is_dir():
        raise DataError(
            f"model.folder: {folder} is no folder; it is relative to the recipe, and holds what save_pretrained writes"
            " (nothing is downloaded)"
        )
    if not (folder / "config.json").is_file():
        raise DataError(f"model.folder: {folder} has no config.json; save a model there with save_pretrained(folder)")
    try:
        found = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"model.folder: {folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise DataError(
            f"model.folder: {folder / 'config.json'} names no model_type; save it with save_pretrained(folder)"
        )
    if "auto_map" in found:
        raise DataError(f"model.folder: {folder} is a model with code of its own, which is not run; use kind: python")
    return found


def check_folder(folder: Path) -> None:
    """Raise DataError for a folder without a configuration, or without weights in safetensors."""
    configuration(folder)
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
    if pickled:
        raise DataError(
            f"model.folder: {folder} has its weights in {pickled[0]}, which may run code when it is read; load it where"
            " you trust it, and save it with save_pretrained(folder, safe_serialization=True)"
        )
    raise DataError(f"model.folder: {folder} has no weights (*.safetensors); save them with save_pretrained(folder)")


def vocabulary(folder: Path) -> int | None:
    """Return how many tokens the model in a folder knows; None for a model without tokens."""
    found = configuration(folder).get("vocab_size")
    return found if isinstance(found, int) else None


class FolderModel(nn.Module):
    """A model of transformers, for rows (B, L) of tokens, below 0 where there is padding, or images (B, C, H, W).

    It returns logits. Called with named arrays, it passes them on. Padding becomes the model's own token of padding, by
    which a decoder that classifies finds a text's last token; without one, that of its end, or 0.
    """

    def __init__(self, model: Any, task: str) -> None:
        super().__init__()
        self.model, self.images = model, task == "image-classification"
        config = model.config
        # a decoder that classifies reads the last token, an encoder-decoder that of the end
        self.ends = task == "sequence-classification" and bool(getattr(config, "is_encoder_decoder", False))
        known = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
        self.padding = next((one for one in known if isinstance(one, int) and one >= 0), 0)
        if not self.images:
            config.pad_token_id = self.padding

    def forward(self, x: Tensor | None = None, **named: Tensor) -> Tensor:
        if x is not None and self.images:
            named = {"pixel_values": x}
        elif x is not None:
            there = x >= 0
            named = {"input_ids": torch.where(there, x, self.padding), "attention_mask": there.long()}
        y: Tensor = self._at_the_end(**named) if self.ends else self.model(**named).logits
        return y

    def _at_the_end(self, input_ids: Tensor, **named: Tensor) -> Tensor:
        """Return an encoder-decoder's logits, from its last state at the last token of the end, or at the first place.

        The classes of transformers do the same by shapes that depend on the records, which no pass of many has.
        """
        model, config, name = self.model, self.model.config, self.model.base_model_prefix
        start = input_ids.new_full((len(input_ids), 1), config.decoder_start_token_id)
        shifted = torch.cat([start, input_ids[:, :-1]], dim=1)
        states = getattr(model, name)(input_ids=input_ids, decoder_input_ids=shifted, **named).last_hidden_state
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        last = ((input_ids == config.eos_token_id) * places).argmax(dim=1)
        own = (places == last.unsqueeze(1)).unsqueeze(-1).to(states.dtype)
        y: Tensor = model.classification_head((states * own).sum(dim=1))
        return y


def builder(settings: HuggingFaceModel, outputs: int, base: Path) -> Callable[[], nn.Module]:
    """Return a builder of the model in `settings.folder`, relative to `base`, with `outputs` classes.

    Raises DataError for a folder that cannot be used, UsageError without transformers, and ModelError for a task, a
    target of LoRA or a pattern that the model does not have.
    """
    folder = base / settings.folder
    check_folder(folder)
    transformers = library("transformers")
    make = _checked_class(transformers, settings, folder)

    def build() -> nn.Module:
        model, loaded = _loaded(make, outputs, folder)
        mismatched = (one if isinstance(one, str) else one[0] for one in loaded["mismatched_keys"])
        new = {*loaded["missing_keys"], *mismatched}
        _choose_trained(model, settings, new)
        if settings.task == "causal-lm":
            _require_causal(model, folder)
        return FolderModel(model, settings.task)

    return build


_PEFT_TASKS = {"sequence-classification": "SEQ_CLS", "token-classification": "TOKEN_CLS", "causal-lm": "CAUSAL_LM"}


def save(module: nn.Module, settings: HuggingFaceModel | None, base: Path, classes: Sequence[Any], out: Path) -> None:
    """Write a trained model to the folder `out` as `save_pretrained` does: the whole, or with LoRA an adapter of peft.

    An adapter holds all that trained: low-rank matrices, head and new layers. Raises UsageError for a module that is
    not of transformers, and for one of which a layer trained beside its own adapter, which no adapter can say.
    """
    inner: Any = module
    while isinstance(inner, FolderModel | NamedInputs):
        inner = inner.model
    if not hasattr(inner, "save_pretrained"):
        raise UsageError(f"save_pretrained: {type(inner).__name__} is no model of transformers; save its state_dict()")
    if classes:
        inner.config.id2label = {number: str(name) for number, name in enumerate(classes)}
        inner.config.label2id = {name: number for number, name in inner.config.id2label.items()}
    if settings is None or settings.lora is None:
        inner.save_pretrained(out)
        return
    trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    whole = sorted({name.rpartition(".")[0] for name in trained if ".lora_" not in name})
    if wrong := [name for name in whole if name.endswith(".base_layer")]:
        raise UsageError(f"save_pretrained: {wrong[0]} trained beside its adapter; take it out of model.lora.targets")
    config = _adapters(settings.lora, modules_to_save=whole or None, task_type=_PEFT_TASKS.get(settings.task))
    make = getattr(library("transformers"), CLASSES[settings.task])
    made = library("peft").get_peft_model(_loaded(make, inner.config.num_labels, base / settings.folder)[0], config)
    held = dict(made.named_parameters())
    with torch.no_grad():
        for name, p in trained.items():
            path, _, last = name.rpartition(".")
            held[f"base_model.model.{name if '.lora_' in name else f'{path}.modules_to_save.default.{last}'}"].copy_(p)
    made.save_pretrained(out)


def _checked_class(transformers: Any, settings: HuggingFaceModel, folder: Path) -> Any:
    """Return the class of transformers for the task. Raises ModelError if the folder's kind of model has none."""
    make = getattr(transformers, CLASSES[settings.task])
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        said = (str(error).splitlines() or [""])[0]
        raise DataError(f"model.folder: {folder} cannot be loaded: {said}") from error
    if type(config) in make._model_mapping:
        return make
    others = [task for task, name in CLASSES.items() if type(config) in getattr(transformers, name)._model_mapping]
    advice = f"; it can do {listed(others)}" if others else ""
    raise ModelError(f"model.task: a {config.model_type} ({folder}) cannot do {settings.task}{advice}")


def _loaded(make: Any, outputs: int, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model of class `make` in a folder, with new layers where it has none, and what was not there.

    Raises DataError if it cannot be loaded.
    """
    how = {} if make.__name__ == CLASSES["causal-lm"] else {"num_labels": outputs}
    how |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with _quiet(library("transformers")):
        try:
            found: tuple[Any, dict[str, Any]] = make.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32, **how
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"model.folder: {folder} cannot be loaded: {said}") from error
    return found


def _require_causal(model: Any, folder: Path) -> None:
    """Raise ModelError if a token changes the logits of places before it: such a model reads what it predicts."""
    training = model.training
    tokens = torch.zeros(1, 4, dtype=torch.long)
    other = torch.tensor([[0, 0, 0, 1]])
    with torch.no_grad():
        first, second = (model.eval()(input_ids=one).logits[0, :3] for one in (tokens, other))
    model.train(training)
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-5):
        raise ModelError(
            f"model.task: the {model.config.model_type} in {folder} reads later tokens, which causal-lm predicts; save"
            " it with is_decoder=True in its configuration, or use a decoder (gpt2, llama)"
        )


def _choose_trained(model: Any, settings: HuggingFaceModel, new: set[str]) -> None:
    """Set which parameters are trained: all, or with LoRA adapters, the head and new layers; `freeze` takes some away.

    Tensors called `new` are not in the folder.
    """
    head = set()
    if settings.lora is not None:
        prefix = f"{model.base_model_prefix}."
        names = [name for name, _ in model.named_parameters()]
        head = {name for name in names if not name.startswith(prefix)} if settings.task != "causal-lm" else set()
        _adapted(model, settings)
        for name, parameter in model.named_parameters():
            # an adapted layer keeps its own weights as base_layer
            if name.replace(".base_layer.", ".") in head | new:
                parameter.requires_grad_(True)
    names = [name for name, _ in model.named_parameters()]
    for pattern in settings.freeze:
        found = [name for name in names if fnmatch(name, pattern)]
        if not found:
            near = similar(pattern.strip("*."), [*{part for name in names for part in name.split(".")}])
            hint = f"; did you mean *{near}*?" if near else f"; names are like {names[0]}"
            raise ModelError(f"model.freeze: {pattern} fits no parameter of the model{hint}")
        random = next((name for name in found if name.replace(".base_layer.", ".") in new), None)
        if random is not None:
            raise ModelError(
                f"model.freeze: {pattern} fits {random}, which the folder does not hold, so that its numbers are random"
                " and have to be trained; use a narrower pattern"
            )
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.requires_grad_(False)


def _adapted(model: Any, settings: HuggingFaceModel) -> None:
    """Add adapters in place. Raises ModelError for a target that no layer has."""
    peft, lora = library("peft"), settings.lora
    assert lora is not None
    kinds = [name for name, part in model.named_modules() if isinstance(part, _adaptable())]
    known = {name.rpartition(".")[2] for name in kinds}
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in kinds):
            near = similar(target, list(known))
            hint = f"did you mean {near}?" if near else f"it has {listed(sorted(known))}"
            raise ModelError(f"model.lora.targets: the model has no dense layer {target}; {hint}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # which peft sets right by itself
        peft.inject_adapter_in_model(_adapters(lora), model)


def _adapters(lora: Lora, **further: Any) -> Any:
    """Return peft's settings of adapters."""
    return library("peft").LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets), lora_dropout=lora.dropout, **further
    )


def _adaptable() -> tuple[type, ...]:
    """Return the classes of layers that LoRA adapts: dense ones, and the transposed dense ones of GPT-2."""
    conv = getattr(importlib.import_module("transformers.pytorch_utils"), "Conv1D", nn.Linear)
    return (nn.Linear, conv)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence progress bars and reports of loading: what is new in a model is said by `recipe check-model`."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
