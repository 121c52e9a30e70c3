"""From a folder of a model and texts to predictions: adapters, tokens, errors. Needs transformers (make
test-transformers); without it, what must be refused without it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

import dpsgd_cli as dpsgd
from dpsgd_cli.audit.auditing import audit
from dpsgd_cli.audit.findings import AuditOptions
from dpsgd_cli.engine import huggingface, models
from dpsgd_cli.engine.settings import HuggingFaceModel
from dpsgd_cli.errors import DataError, ModelError, RecipeError, RunError, UsageError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import build_models
from dpsgd_cli.training.plans import resolve_auto

THERE = all(importlib.util.find_spec(name) is not None for name in ("transformers", "peft"))
transformers: Any = importlib.import_module("transformers") if THERE else None
NEEDS = pytest.mark.skipif(not THERE, reason="needs transformers and peft: pip install 'dpsgd[transformers]'")

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] good bad a film is the plot of day and night".split()  # noqa: SIM905
SIZES = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "max_position_embeddings": 16, "vocab_size": len(WORDS),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `bert`, `gpt` and `vit`, random, and `texts.csv`, `texts.jsonl` and a folder `files` of texts."""
    here = tmp_path_factory.mktemp("models")
    (here / "bert").mkdir()
    (here / "bert" / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(here / "bert" / "vocab.txt")).save_pretrained(here / "bert")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(here / "bert")
    gpt = transformers.GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1
    )
    transformers.GPT2LMHeadModel(gpt).save_pretrained(here / "gpt")
    vit = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**vit, image_size=8, patch_size=4, num_channels=1)
    transformers.ViTForImageClassification(config).save_pretrained(here / "vit")
    texts = [f"a {'good' if row % 2 else 'bad'} film and the plot {'of day' * (row % 3)}" for row in range(40)]
    labels = ["good" if row % 2 else "bad" for row in range(40)]
    pd.DataFrame({"text": texts, "label": labels}).to_csv(here / "texts.csv", index=False)
    pd.DataFrame({"text": texts, "label": labels}).to_json(here / "texts.jsonl", orient="records", lines=True)
    for row, (text, label) in enumerate(zip(texts, labels, strict=True)):
        (here / "files" / label).mkdir(parents=True, exist_ok=True)
        (here / "files" / label / f"{row}.txt").write_text(text)
    draw = np.random.default_rng(0)
    np.savez(here / "lm.npz", x=draw.integers(2, 20, (40, 6)), x_test=draw.integers(2, 20, (10, 6)))
    np.savez(here / "images.npz", x=draw.integers(0, 256, (40, 1, 8, 8)).astype(np.uint8), y=np.arange(40) % 2)
    return here


LORA = {"rank": 2, "targets": ["query", "value"]}
BERT = {"kind": "huggingface", "folder": "bert", "task": "sequence-classification", "public": True}


def recipe(**changes: Any) -> dict[str, Any]:
    text = {"column": "text", "length": 12}
    data = {"path": "texts.csv", "target": "label", "classes": ["bad", "good"], "text": text, "evaluation": "public"}
    given: dict[str, Any] = {
        "name": "texts", "data": data | {"split": {"test": 0.2}}, "model": BERT | {"lora": LORA},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 16, "learning_rate": 0.1},
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-5}},
        "epochs": 1, "seed": 0,
    }  # fmt: skip
    for name, value in changes.items():
        given[name] = given[name] | value if isinstance(value, dict) else value
    return given


def trained(folder: Path, out: Path, **changes: Any) -> dpsgd.Result:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe(**changes)))
    return dpsgd.train(str(path), out=out)


@NEEDS
def test_from_texts_to_predictions_by_adapters(folder: Path, tmp_path: Path) -> None:
    result = trained(folder, tmp_path)
    where = result.directory
    document = json.loads((where / "result.json").read_text())
    with safe_open(where / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names and all("lora_" in name or "classifier" in name for name in names), "adapter and head alone"
    files = set(document["provenance"]["weights_sha256"])
    assert {"bert/model.safetensors", "bert/config.json", "bert/tokenizer.json"} <= files
    said = " ".join(document["privacy"]["declarations"])
    assert "numbers in bert" in said and "tokenizer in bert" in said
    texts = ["a good film", "the plot is bad " * 9, ""]
    together = result.predict(pd.DataFrame({"text": texts}))
    assert list(together) == [result.predict(pd.DataFrame({"text": [text]}))[0] for text in texts]
    assert set(together) <= {"bad", "good"}
    kept = (folder / "bert" / "config.json").read_bytes()
    try:
        (folder / "bert" / "config.json").write_bytes(kept + b" ")
        with pytest.raises(RunError, match=r"another content of bert/config\.json"):
            dpsgd.load(where).predict(pd.DataFrame({"text": texts}))
    finally:
        (folder / "bert" / "config.json").write_bytes(kept)


@NEEDS
def test_adapters_train_on_from_a_result_of_adapters(folder: Path, tmp_path: Path) -> None:
    """A second training that hardly moves has the first one's answers, and both budgets."""
    private = {"data": {"evaluation": "private"}, "seed": None}
    first = trained(folder, tmp_path, **private, method={"learning_rate": 1})
    budget = {"budget": {"epsilon": 1, "delta": 1e-6}, "start": str(first.directory)}
    second = trained(folder, tmp_path, **private, name="on", method={"learning_rate": 1e-12}, privacy=budget)
    assert second.privacy["epsilon"] > first.privacy["epsilon"] + 0.5
    x = first.inputs(pd.DataFrame({"text": ["a good film", "the plot is bad " * 9]}))
    torch.testing.assert_close(second.module()(x), first.module()(x))


@NEEDS
@pytest.mark.parametrize("lora", [LORA, None], ids=["adapters", "all layers"])
def test_transformers_and_peft_load_a_result_to_the_same_logits(folder: Path, tmp_path: Path, lora: Any) -> None:
    result = trained(folder, tmp_path, model={"lora": lora}, method={"learning_rate": 1})
    x = result.inputs(pd.DataFrame({"text": ["a good film", "the plot is bad " * 9, ""]}))
    given = {"input_ids": x.clamp_min(0), "attention_mask": (x >= 0).long()}
    result.save_pretrained(tmp_path / "saved")
    auto = transformers.AutoModelForSequenceClassification
    if lora is None:
        found = auto.from_pretrained(tmp_path / "saved")
        assert found.config.id2label == {0: "bad", 1: "good"}
    else:
        base = auto.from_pretrained(folder / "bert", num_labels=2)
        with torch.no_grad():
            before = base.eval()(**given).logits
        found = importlib.import_module("peft").PeftModel.from_pretrained(base, tmp_path / "saved")
        assert float((found.eval()(**given).logits - before).abs().max()) > 1e-2
    torch.testing.assert_close(found.eval()(**given).logits, result.module()(x))


@NEEDS
def test_a_table_json_lines_and_files_have_the_same_tokens(folder: Path) -> None:
    from dpsgd_cli.data.opening import load_raw
    from dpsgd_cli.data.settings import Data

    def read(**changes: Any) -> tuple[np.ndarray, np.ndarray]:
        told = {"classes": ["bad", "good"], "text": {"length": 12, "folder": "bert", "public": True}} | changes
        part = load_raw(Data.model_validate(told), folder).train
        order = np.lexsort(np.asarray(part.x).T)
        return np.asarray(part.x)[order], np.asarray(part.y)[order]

    column = {"column": "text", "length": 12, "folder": "bert", "public": True}
    ways = [
        read(path="texts.csv", target="label", text=column),
        read(path="texts.jsonl", target="label", text=column),
        read(path="files"),
    ]
    for x, y in ways[1:]:
        assert np.array_equal(x, ways[0][0]) and np.array_equal(y, ways[0][1])
    first = ways[0][0][0].tolist()
    assert first[0] == WORDS.index("[CLS]") and -1 in first, "padded with what is no token"
    cut = read(path="texts.csv", target="label", text=column | {"length": 4})[0]
    assert cut.shape == (40, 4) and (cut[:, -1] == WORDS.index("[SEP]")).all()


@NEEDS
def test_padding_does_not_count(folder: Path) -> None:
    settings = HuggingFaceModel.model_validate(BERT)
    model = huggingface.builder(settings, 2, folder)().eval()
    tokens = torch.tensor([[2, 5, 7, 3]])
    longer = torch.tensor([[2, 5, 7, 3, -1, -1]])
    torch.testing.assert_close(model(tokens), model(longer))


def _classifier(kind: str, folder: Path) -> None:
    """Save a small model of one kind, for sequences of the words above; `[SEP]` (3) ends a text."""
    ends = {"eos_token_id": 3, "bos_token_id": 2}
    if kind == "gpt2":
        small = transformers.GPT2Config(vocab_size=len(WORDS), n_positions=16, n_embd=8, n_layer=1, n_head=2, **ends)
        made = transformers.GPT2Model(small)
    elif kind == "llama":
        made = transformers.LlamaModel(transformers.LlamaConfig(**SIZES, **ends))
    elif kind == "roberta":
        made = transformers.RobertaModel(transformers.RobertaConfig(**SIZES | {"max_position_embeddings": 18}))
    elif kind == "bart":
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        rest = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 16}
        config = transformers.BartConfig(
            vocab_size=len(WORDS), pad_token_id=0, decoder_start_token_id=3, **layers, **rest, **ends
        )
        made = transformers.BartModel(config)
    else:
        config = transformers.T5Config(
            vocab_size=len(WORDS),
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            **ends,
        )
        made = transformers.T5Model(config)
    made.save_pretrained(folder)


@NEEDS
@pytest.mark.parametrize("kind", ["gpt2", "llama", "roberta", "bart", "t5"])
def test_every_kind_of_model_classifies_a_text_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """One text alone, as its own class computes it; and padding, which says how long others are, changes nothing."""
    torch.manual_seed(0)
    _classifier(kind, tmp_path / kind)
    settings = HuggingFaceModel.model_validate(BERT | {"folder": kind})
    torch.manual_seed(1)
    model = huggingface.builder(settings, 2, tmp_path)().eval()
    text = torch.tensor([[2, 5, 7, 9, 3]])
    with torch.no_grad():
        alone = model(text)
        torch.testing.assert_close(alone, model.model(input_ids=text).logits)  # type: ignore[operator]
        torch.testing.assert_close(alone, model(torch.nn.functional.pad(text, (0, 3), value=-1)))
        two = model(torch.stack([torch.nn.functional.pad(text[0], (0, 3), value=-1), torch.arange(2, 10)]))
        torch.testing.assert_close(alone[0], two[0])


def test_padding_is_the_models_own_token() -> None:
    """A decoder finds the end of a text by it; without one it is the token of the end, or 0."""

    class Stub(torch.nn.Module):
        def __init__(self, **config: int | None) -> None:
            super().__init__()
            self.config = SimpleNamespace(**config)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.stack([input_ids, attention_mask]))

    for config, padding in (({"pad_token_id": 5, "eos_token_id": 7}, 5), ({"eos_token_id": 7}, 7), ({}, 0)):
        model = huggingface.FolderModel(Stub(**config), "sequence-classification")
        assert model(torch.tensor([[3, -1]])).tolist() == [[[3, padding]], [[1, 0]]]


@NEEDS
def test_next_tokens_in_bfloat16_and_images(folder: Path, tmp_path: Path) -> None:
    given = recipe(
        model={"folder": "gpt", "task": "causal-lm", "dtype": "bfloat16", "lora": LORA | {"targets": ["c_attn"]}}
    )
    given["data"] = {"path": "lm.npz", "task": "next-token"}
    (folder / "lm.yaml").write_text(json.dumps(given))
    result = dpsgd.train(str(folder / "lm.yaml"), out=tmp_path)
    assert 10 < result.metrics["test_perplexity"]["mean"] < 40
    assert 0 <= result.metrics["test_token_accuracy"]["mean"] <= 1
    vit = {"kind": "huggingface", "folder": "vit", "task": "image-classification", "public": True, "freeze": ["vit.*"]}
    given = recipe() | {"model": vit}
    given["data"] = {"path": "images.npz", "classes": [0, 1], "evaluation": "public", "split": {"test": 0.2}}
    (folder / "images.yaml").write_text(json.dumps(given))
    found = dpsgd.train(str(folder / "images.yaml"), out=tmp_path)
    assert "test_accuracy" in found.metrics
    with safe_open(found.directory / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"model.classifier.weight", "model.classifier.bias"}


def built(base: Path, **changes: Any) -> Any:
    settings = HuggingFaceModel.model_validate(BERT | changes)
    return huggingface.builder(settings, 2, base)()


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "bert is no folder"),
        ({"readme.txt": ""}, "has no config.json"),
        ({"config.json": "{}"}, "names no model_type"),
        ({"config.json": '{"model_type": "bert", "auto_map": {}}', "model.safetensors": ""}, "code of its own"),
        ({"config.json": '{"model_type": "bert"}', "pytorch_model.bin": ""}, "pytorch_model.bin, which may run code"),
        ({"config.json": '{"model_type": "bert"}'}, "has no weights"),
    ],
)
def test_a_folder_without_a_model_is_told(tmp_path: Path, files: dict[str, str] | None, told: str) -> None:
    """No library is needed to say so."""
    for name, content in (files or {}).items():
        (tmp_path / "bert").mkdir(exist_ok=True)
        (tmp_path / "bert" / name).write_text(content)
    with pytest.raises(DataError, match=told):
        built(tmp_path)


@NEEDS
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "image-classification"}, "a bert .* cannot do image-classification; it can do"),
        ({"lora": {"targets": ["querry"]}}, "no dense layer querry; did you mean query"),
        ({"freeze": ["classifier.*"]}, "classifier.weight, which the folder does not hold"),
        ({"task": "causal-lm"}, r"the bert in .*bert reads later tokens"),
        ({"freeze": ["encodr.*"]}, r"encodr\.\* fits no parameter .*did you mean \*encoder"),
    ],
)
def test_mistakes_about_a_model_are_told(folder: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        built(folder, **changes)


@NEEDS
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {"text": {"column": "txt", "length": 12}}}, "no column 'txt'; did you mean 'text'"),
        ({"model": {"task": "token-classification"}}, "token-classification does not go with data.task"),
        ({"model": {"public": False}}, "outside of the statement"),
        ({"data": {"bounds": {"text": [0, 1]}}}, "data.text is all of a record's input"),
    ],
)  # fmt: skip
def test_mistakes_of_a_recipe_are_told(folder: Path, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises((RecipeError, DataError), match=told):
        trained(folder, tmp_path, **changes)


def test_without_the_extra_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("dpsgd_cli.engine.huggingface.importlib.import_module", absent)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "bert" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"pip install 'dpsgd\[transformers\]'"):
        built(tmp_path)


@NEEDS
def test_new_layers_train_even_where_they_are_adapted(folder: Path) -> None:
    lora = LORA | {"targets": ["query", "classifier"]}
    model = built(folder, lora=lora)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "model.classifier.base_layer.weight" in trained
    assert not any("query.base_layer" in name for name in trained)


@NEEDS
def test_a_token_that_a_model_does_not_know_is_refused(folder: Path, tmp_path: Path) -> None:
    given = recipe(model={"folder": "gpt", "task": "causal-lm", "lora": None})
    given["data"] = {"path": "strange.npz", "task": "next-token"}
    np.savez(folder / "strange.npz", x=np.full((40, 6), 20), x_test=np.full((5, 6), 3))
    (folder / "strange.yaml").write_text(json.dumps(given))
    with pytest.raises(DataError, match=r"a token of 20 or more, and the model in gpt knows 0 to 19"):
        dpsgd.train(str(folder / "strange.yaml"), out=tmp_path)


def _mixing(patch: pytest.MonkeyPatch) -> None:
    """Run whole batches, untested, and give each example the answer of the one before it."""
    usual = huggingface.FolderModel.forward

    def forward(self: Any, x: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
        return usual(self, x, **named).roll(1, 0)

    patch.setattr(models, "BUILT_IN", {**models.BUILT_IN, "huggingface": None})
    patch.setattr(build_models, "check_model", lambda *rest: None)
    patch.setattr(huggingface.FolderModel, "forward", forward)


@NEEDS
@pytest.mark.parametrize("plant", [None, _mixing], ids=["clean", "mixing"])
def test_an_audit_of_bert_with_adapters_refutes_what_leaks_in_it(
    folder: Path, plant: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tier D: neighbouring texts, trained with the same randomness."""
    (folder / "audited.yaml").write_text(json.dumps(recipe()))
    loaded = resolve_auto(load_recipe(str(folder / "audited.yaml")))
    if plant is not None:
        plant(monkeypatch)
    found = audit(loaded, AuditOptions(("D",), quick=True))
    assert found["refuted"] == (plant is not None), found["refuted_by"]
    assert plant is None or any("summed gradients" in name for name in found["refuted_by"])
