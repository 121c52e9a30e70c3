"""Checkpoints and results that were changed with care, so that all hashes are right: an answer or an error of ours.

Each case is a place and one of `MUTATIONS`, drawn with a fixed seed. A command may refuse what it finds, or take it; it
never fails with a traceback, "a bug of ours" or a signal.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from dpsgd_cli.engine import bundle
from dpsgd_cli.errors import RunError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import reading
from dpsgd_cli.training import checkpoint, loop
from dpsgd_cli.training.plans import resolve_auto

SEED = 20261125
EACH = 120
GONE = object()
Change = Callable[[Any, random.Random], Any]


def _wrapped(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice([1, 200])):
        value = [value]
    return value


def _shorter(value: Any, rng: random.Random) -> Any:
    return value[: len(value) // 2] if isinstance(value, str | list) else GONE


def _twice(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        return {**value, "more": value}
    return value * 2 if isinstance(value, str | list | int | float) else [value, value]


def _of_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """What stands for a tensor where there is none is a number."""
    return lambda value, rng: change(value) if isinstance(value, torch.Tensor) else 7


def _always(new: Any) -> Change:
    return lambda value, rng: copy.deepcopy(new)


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 2**53, 2**64, -(10**30), 10**400, 1e308, 1e-320, "", "x", "0", "nan",
    "Infinity", "\x1b[31mred", "\x00", "a\nb", "é" * 5000, "../../x", "/", "=cmd()", "auto", "null", "{}", "[]", [], {},
    [[]], [None], [0], {"": ""}, {"kind": "x"}, {"0": [1]},
)  # fmt: skip
MUTATIONS: dict[str, Change] = {
    "gone": lambda value, rng: GONE,
    **{repr(new)[:30]: _always(new) for new in ODD},
    "surrogate": lambda value, rng: "\ud800",
    "wrapped": _wrapped,
    "shorter": _shorter,
    "twice": _twice,
    "text": lambda value, rng: str(value)[:1000],
    "number": lambda value, rng: rng.uniform(-1e3, 1e3),
    "tensor of more axes": _of_tensor(lambda t: t[None]),
    "tensor of fewer numbers": _of_tensor(lambda t: t.flatten()[: t.numel() // 2]),
    "tensor of integers": _of_tensor(lambda t: t.to(torch.int64)),
    "tensor of no numbers": _of_tensor(lambda t: t.new_full(t.shape, float("nan")) if t.is_floating_point() else t - 9),
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all parts of a nested value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def changed(value: Any, path: tuple[Any, ...], change: Change, rng: random.Random) -> Any:
    """`value` with one place changed; tuples stay tuples."""
    if not path:
        return change(value, rng)
    (key, *rest) = path
    new = changed(value[key], tuple(rest), change, rng)
    if isinstance(value, dict):
        return {k: new if k == key else v for k, v in value.items() if k != key or new is not GONE}
    made = [new if i == key else v for i, v in enumerate(value) if i != key or new is not GONE]
    return tuple(made) if isinstance(value, tuple) else made


def cases(value: Any, times: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Changed values, with words for what was changed; every mutation comes up, and every key at the top."""
    rng = random.Random(SEED + seed)
    all_places, names = list(places(value)), list(MUTATIONS)
    top = [path for path in all_places if len(path) == 1]
    for number in range(times):
        path = top[number % len(top)] if number % 3 == 0 else rng.choice(all_places)
        name = names[number % len(names)] if number % 2 else rng.choice(names)
        yield f"{path}: {name}", changed(value, path, MUTATIONS[name], rng)


def answered(told: str, *args: str | Path) -> None:
    result = CliRunner().invoke(main, [*map(str, args)])
    import os

    if os.environ.get("FUZZ") and ("bug of ours" in result.output or result.exit_code not in (0, 1, 2)):
        print("FOUND", told[:150], args[0], result.output[-420:].strip().replace(chr(10), " "))
        return
    assert result.exception is None or isinstance(result.exception, SystemExit), (told, args, result.exception)
    assert result.exit_code in (0, 1, 2), (told, args)
    assert "bug of ours" not in result.output, (told, args, result.output[-600:])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, its table, a finished result in `out` and a checkpoint in `stopped`."""
    folder = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{'uvw'[n % 3]},{n % 2}" for n, (a, b) in enumerate(rng.random((48, 2)))]
    (folder / "own.csv").write_text("\n".join(["a,b,c,y", *rows]) + "\n")
    (folder / "own.yaml").write_text(
        "name: own\n"
        "data:\n  path: own.csv\n  target: y\n  classes: [0, 1]\n  bounds: {a: [0, 1], b: [0, 1]}\n"
        "  categorical: {c: [u, v, w]}\n"
        "  preprocess: [{one-hot: {}}, {scale: {}}, {pca: {components: 2, noise_multiplier: 9}}]\n"
        "model: {kind: linear}\n"
        "method: {kind: dp-sgd, batching: poisson, batch_size: 12, learning_rate: 0.5,"
        " optimizer: {kind: adam}, averaging: {kind: ema}}\n"
        "privacy: {schedule: {kind: uniform, initial: 8}, delta: 1e-3}\n"
        "epochs: 4\nseed: 0\nrepeats: 2\nsave_model: true\nruntime: {threads: 1}\n"
    )
    loaded = load_recipe(str(folder / "own.yaml"))
    loop.run(resolve_auto(loaded), loop.Options(folder / "out"))

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(RunError, match="2 of 4"):
        loop.run(resolve_auto(loaded), loop.Options(folder / "stopped", progress=stop))
    return folder


def result_in(folder: Path) -> Path:
    (directory,) = (path for path in (folder / "out").iterdir() if path.is_dir())
    return directory


def test_the_mutations_are_enough() -> None:
    assert len(MUTATIONS) >= 40


@pytest.mark.parametrize("command", ["--resume", "--finish"])
def test_checkpoints(made: Path, tmp_path: Path, command: str) -> None:
    (saved,) = (made / "stopped").glob(".*.checkpoint")
    content = checkpoint.load(saved)
    assert content is not None
    out = tmp_path / "out"
    for number, (told, mutated) in enumerate(cases(content, EACH, seed=1 if command == "--resume" else 2)):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        try:
            checkpoint.save(out / saved.name, mutated)
        except (TypeError, UnicodeEncodeError, ValueError, RecursionError):
            continue  # what cannot be written
        answered(f"{number} {told}", "train", made / "own.yaml", command, "--out", out)
        answered(f"{number} {told}", "account", out / saved.name)


def sealed(directory: Path, document: Any, **others: bytes) -> None:
    """Write a result's files, with the hashes that belong to them."""
    for name, held in others.items():
        (directory / name.replace("__", ".")).write_bytes(held)
    if isinstance(document, dict):
        try:
            names = [*reading.WITH_EVERY_RESULT, "model.safetensors"]
            document = reading.sealed(document, {name: (directory / name).read_bytes() for name in names})
        except (KeyError, TypeError, AttributeError):
            document = reading.sealed(document)
    (directory / "result.json").write_text(json.dumps(document), encoding="utf-8", errors="surrogatepass")


def asked_of(told: str, made: Path, directory: Path, rng: random.Random) -> None:
    """Commands that read a result; three of them each time, since all take a second."""
    other = result_in(made)
    commands: list[tuple[str | Path, ...]] = [
        ("predict", directory, made / "own.csv"),
        ("evaluate", directory, made / "own.csv"),
        ("report", directory),
        ("compare", directory, other),
        ("train", made / "own.yaml", "--out", directory.parent),
    ]
    for command in rng.sample(commands, 3):
        answered(told, *command)


def test_documents(made: Path, tmp_path: Path) -> None:
    source, rng = result_in(made), random.Random(SEED)
    document = json.loads((source / "result.json").read_text())
    for number, (told, mutated) in enumerate(cases(document, EACH, seed=3)):
        directory = tmp_path / str(number) / source.name
        shutil.copytree(source, directory)
        sealed(directory, mutated)
        asked_of(f"{number} {told}", made, directory, rng)


def test_recipes_and_ledgers_of_results(made: Path, tmp_path: Path) -> None:
    source, rng = result_in(made), random.Random(SEED + 1)
    document = json.loads((source / "result.json").read_text())
    for number in range(EACH):
        directory = tmp_path / str(number) / source.name
        shutil.copytree(source, directory)
        name = rng.choice(["recipe.yaml", "ledger.jsonl", "trials.csv", "history.csv"])
        lines = (source / name).read_text().splitlines(keepends=True)
        line = rng.randrange(len(lines))
        words = lines[line].split(" " if name.endswith("l") else ",")
        word = rng.randrange(len(words))
        new = MUTATIONS[rng.choice(list(MUTATIONS))](words[word], rng)
        words[word] = "" if new is GONE else json.dumps(new) if rng.random() < 0.5 else str(new)[:10_000]
        lines[line] = rng.choice([" ".join(words) if name.endswith("l") else ",".join(words), "", lines[line] * 2])
        (directory / name).write_text("".join(lines), encoding="utf-8", errors="surrogatepass")
        sealed(directory, document)
        asked_of(f"{number} {name}:{line + 1} word {word} is {str(new)[:40]!r}", made, directory, rng)


def test_models(made: Path, tmp_path: Path) -> None:
    source, rng = result_in(made), random.Random(SEED + 2)
    document = json.loads((source / "result.json").read_text())
    about, tensors = bundle.read(source / "model.safetensors").about, load_file(source / "model.safetensors")
    both = {"about": about, "tensors": tensors}
    for number, (told, mutated) in enumerate(cases(both, EACH, seed=4)):
        directory = tmp_path / str(number) / source.name
        shutil.copytree(source, directory)
        kept = mutated.get("tensors", {})
        if not isinstance(kept, dict) or not all(isinstance(held, torch.Tensor) for held in kept.values()):
            continue
        text = json.dumps(mutated["about"]) if "about" in mutated else "{"
        try:
            save_file(
                {name: held.contiguous() for name, held in kept.items()},
                directory / "model.safetensors",
                {"dpsgd": text},
            )
        except (UnicodeEncodeError, ValueError):
            continue
        sealed(directory, document)
        asked_of(f"{number} {told}", made, directory, rng)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("name",), "\ud800"), (("privacy", "scope"), "\ud800"), (("privacy", "sensitivity"), "\ud800"),
        (("provenance", "chosen"), True), (("privacy", "attacker", "true_positives", "0.001"), 1e308),
    ],
)  # fmt: skip
def test_documents_that_once_were_internal_errors(made: Path, tmp_path: Path, path: tuple[str, ...], new: Any) -> None:
    directory = tmp_path / result_in(made).name
    shutil.copytree(result_in(made), directory)
    document = json.loads((directory / "result.json").read_text())
    sealed(directory, changed(document, path, lambda value, rng: new, random.Random(0)))
    for command in (("report", directory), ("compare", directory, result_in(made)), ("evaluate", directory)):
        refused(*command, says="result.json")


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("recipe.yaml", "  path: ", "path: ", "data section of a resolved recipe cannot be read"),
        ("recipe.yaml", "  path: ", "  path: \x00", "data section of a resolved recipe cannot be read"),
        ("recipe.yaml", "  path: own.csv", "  path: \ud800", "recipe.yaml: cannot be read"),
        ("recipe.yaml", "  path: own.csv", "  path: [1]", "data.path: "),
        ("history.csv", "\n0,0,0,", "\n0,0,18446744073709551616,", "history.csv: is no table of epochs"),
        ("history.csv", "\n0,0,0,", "\n0,0,0,x", "history.csv: is no table of epochs"),
    ],
)
def test_files_that_once_were_internal_errors(
    made: Path, tmp_path: Path, name: str, old: str, new: str, says: str
) -> None:
    directory = tmp_path / result_in(made).name
    shutil.copytree(result_in(made), directory)
    text = (directory / name).read_text()
    assert text.count(old) == 1
    (directory / name).write_text(text.replace(old, new), encoding="utf-8", errors="surrogatepass")
    sealed(directory, json.loads((directory / "result.json").read_text()))
    command = ("report", directory) if name == "history.csv" else ("compare", directory, result_in(made))
    refused(*command, says=says)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("history", 0, 2, "loss"), GONE), (("released", "0/2"), "0"), (("method", "done"), "2"), (("done",), 10**400),
        (("method", "values"), torch.zeros(1)), (("init_seeds",), [1]), (("ledgers", 0), []),
    ],
)  # fmt: skip
def test_checkpoints_that_once_were_internal_errors(
    made: Path, tmp_path: Path, path: tuple[Any, ...], new: Any
) -> None:
    (saved,) = (made / "stopped").glob(".*.checkpoint")
    content = checkpoint.load(saved)
    assert content is not None
    checkpoint.save(tmp_path / saved.name, changed(content, path, lambda value, rng: new, random.Random(0)))
    for command in ("--resume", "--finish"):
        refused("train", made / "own.yaml", command, "--out", tmp_path, says="remove it and train again")


def refused(*args: str | Path, says: str) -> None:
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exit_code in (1, 2), result.output
    assert "bug of ours" not in result.output and says in result.output.replace("\n", " "), result.output


@pytest.mark.parametrize("name", ["format", "input_shape", "classes", "layout", "preprocess", "made_from"])
def test_a_model_file_that_lacks_what_predicting_needs_is_refused(made: Path, tmp_path: Path, name: str) -> None:
    source = result_in(made)
    directory = tmp_path / source.name
    shutil.copytree(source, directory)
    about = {key: value for key, value in bundle.read(source / "model.safetensors").about.items() if key != name}
    save_file(load_file(source / "model.safetensors"), directory / "model.safetensors", {"dpsgd": json.dumps(about)})
    sealed(directory, json.loads((source / "result.json").read_text()))
    refused("predict", directory, made / "own.csv", says="model.safetensors")
