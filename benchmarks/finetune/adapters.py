"""Adapters on a folder of a model, on SST-2: what is trained and kept. The model is random, so it shows mechanics only.

    DPSGD_DATA=... python -m benchmarks.finetune.adapters    # writes results/finetune/adapters.csv

It needs `pip install 'dpsgd[text,transformers]'`. The vocabulary is wordfreq's public list. With a folder of a model
that was trained on public texts in place of the random one, the same recipe fine-tunes it.
"""

from __future__ import annotations

import csv
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import RESULTS

ADAPTERS = RESULTS / "finetune" / "adapters.csv"
WORDS = 4000
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
LORA = {"rank": 8, "alpha": 16, "targets": ["query", "value"]}


def recipe(folder: str, lora: dict[str, Any] | None) -> dict[str, Any]:
    """Return the recipe that fine-tunes the model in `folder` on SST-2."""
    model = {"kind": "huggingface", "folder": folder, "task": "sequence-classification", "public": True}
    return {
        "name": "adapters",
        "data": {"name": "sst2", "text": {"column": "sentence", "length": 32}},
        "model": model if lora is None else model | {"lora": lora},
        "method": {
            "kind": "dp-sgd",
            "batching": "poisson",
            "batch_size": 692,
            "optimizer": {"kind": "adamw"},
            "learning_rate": 0.003,
        },
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-5}},
        "epochs": 1,
        "seed": 0,
        "runtime": {"threads": 1},
    }


def make_folder(folder: Path) -> None:
    """Save a random BERT, and a tokenizer of the most frequent English words."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer
    from wordfreq import top_n_list

    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *top_n_list("en", WORDS)]
    (folder / "vocab.txt").write_text("\n".join(words), "utf-8")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=64, **SIZES)).save_pretrained(folder)


def main() -> None:
    """Train with adapters and without, and write what each trained and kept."""
    from safetensors import safe_open

    import dpsgd_cli as dpsgd

    rows = []
    with tempfile.TemporaryDirectory() as place:
        make_folder(Path(place) / "bert")
        for name, lora in (("adapters of rank 8, and the head", LORA), ("all weights", None)):
            told = recipe(str(Path(place) / "bert"), lora)
            result = dpsgd.train(told, out=Path(place) / "out")
            kept = result.directory / "model.safetensors"
            with safe_open(kept, "pt") as file:
                numbers = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
            accuracy = result.metrics["test_accuracy"]["mean"]
            rows.append([name, numbers, kept.stat().st_size, f"{100 * accuracy:.1f}"])
            print(*rows[-1], flush=True)
    with ADAPTERS.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([("trained", "numbers", "bytes", "accuracy"), *rows])


if __name__ == "__main__":
    main()
