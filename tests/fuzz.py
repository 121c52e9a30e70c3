"""Mutated inputs through the command: each gets an answer or an error of ours, in time. Seeds are fixed.

Case n is a function of its number alone. It changes one input (a recipe, an override, a table, JSON lines, arrays, a
card, a ledger, a result with renewed hashes or without, a checkpoint or a model by bytes or by content, a sweep, the
value of an option) or makes up a file, and calls one command on it, in this process. It fails with an exception, "a bug
of ours", a character that a terminal would obey, an exit code other than 0, 1 and 2, or after `LIMIT_SECONDS`. The
files of a failed case stay in `--keep DIR`.

    python -m tests.fuzz --cases 5000 [--first N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import hashlib
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from dpsgd_cli.common.text_format import visible
from dpsgd_cli.engine import bundle
from dpsgd_cli.errors import RunError
from dpsgd_cli.main import main
from dpsgd_cli.recipe import expected
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results import reading
from dpsgd_cli.training import checkpoint, loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import recipe_writer

LIMIT_SECONDS = 30.0
_MOST_MEMORY = 24 << 30
GONE = object()
"""Stands for a value that is removed."""
ODD: list[Any] = [
    GONE, None, True, False, 0, -1, 1, 0.5, 2**53, 2**53 + 1, 2**63, 2**64, -(10**30), 10**300, 10**400, 1e308, -1e308,
    1e-320, float("inf"), float("nan"), -0.0, 7, [], {}, [[]], [[[]]], [None], [0], {"a": 1}, {"": ""}, {"kind": "x"},
    {"0": [1]}, {"mechanism": "zcdp"}, "", "a", "0", "nan", "Infinity", "auto", "null", "{}", "[]", "=cmd()",
    "\x1b[31m", "\u202e", "..", "../../x", "/", "x" * 3000, "\u0000", "a\nb", "1e400", "2020-01-01", "~", "é",
    "é" * 5000, "\ud800",
]  # fmt: skip
_TOKENS = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"nan",
    b"-1",
    b"1e999",
    b"\n",
    b'"',
    b"{",
    b"[" * 200,
    b": ",
    b"!!int x",
    b"\x1b[",
]
_FLAGS = ["--noise-multiplier", "--sampling-rate", "--steps", "--epochs", "--delta", "--target-epsilon", "--records",
          "--batch-size", "--group", "--trials", "--best-of", "--at-epsilon", "--over", "--solve", "--accountant",
          "--batching", "--adjacency", "--max-epsilon", "--target-rho", "--law"]  # fmt: skip
_VALUES = ["0", "1", "-1", "nan", "inf", "-inf", ".inf", ".nan", "1e308", "-1e308", "1e-320", "1e400", "0.01", "1/0",
           "600/60000", "", "all", "zcdp", "rdp", "poisson", "shuffle", "order=2:8:1", "delta=.1:.2:.1", "0x10", "10",
           "noise-multiplier", "steps", "\x1b", "9" * 40, "9" * 299, "null", "true", "[]", "{}", "[[]]", "a", "auto",
           "~", "{a: 1}", "[1, 2]", "\x00", "!!python/object:os.system x"]  # fmt: skip
_CELLS = ["", "1", "0", "x", "1e999", "nan", '"', "\x00", "1,2", "\n", "-0", "\u00e9"]
_ARRAYS = [np.zeros((3, 2)), np.zeros(3), np.zeros((0, 2)), np.array(["a", "b", "c"]), np.full((3, 2), np.nan),
           np.array(1), np.zeros((3, 2), complex), np.array([0, 1, 0]),
           np.array([(1, 2.0)], dtype=[("a", int), ("b", float)])]  # fmt: skip
_LINE = {"mechanism": "gaussian", "noise_multiplier": 1.0, "adjacency": "add-remove", "batching": "full", "count": 1}
_LINE_KEYS = ["mechanism", "noise_multiplier", "adjacency", "batching", "sampling_rate", "sensitivity", "count",
              "trial", "phase", "epoch", "within", "epsilon", "delta", "rho", "source", "label", "step"]  # fmt: skip


class Hang(BaseException):
    """The case took longer than it may."""


@dataclass(frozen=True)
class Case:
    """What was called in `folder`, and what is wrong with the answer, if anything is."""

    number: int
    kind: str
    arguments: list[str]
    folder: Path
    wrong: str | None
    seconds: float


def make_inputs(folder: Path) -> None:
    """Write valid inputs, one of each kind, small enough that a case takes a moment."""
    write = recipe_writer(folder)
    own = {"repeats": 1, "epochs": 2}
    loaded = load_recipe(str(write(**own)))
    loop.run(resolve_auto(loaded), loop.Options(folder, save_models=True)).rename(folder / "result")
    x = np.load(folder / "tiny.npz")["x"]
    np.save(folder / "x.npy", x)
    rows = [{"a": round(float(r[0]), 3), "b": "uv"[n % 2], "y": f"c{n % 3}"} for n, r in enumerate(x)]
    (folder / "t.csv").write_text("a,b,y\n" + "".join(f"{r['a']},{r['b']},{r['y']}\n" for r in rows))
    (folder / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = {"target": "y", "bounds": {"a": [0, 1]}, "categorical": {"b": ["u", "v"]}, "classes": ["c0", "c1", "c2"],
            "split": {"test": 8}}  # fmt: skip
    for ending in ("csv", "jsonl"):
        content = yaml.safe_load(write(data=data | {"path": f"t.{ending}"}, **own).read_text())
        (folder / f"{ending}.yaml").write_text(yaml.safe_dump(content))
    write(**own)
    sweep = {"name": "sweep", "recipes": ["tiny.yaml"], "grid": {"method.learning_rate": [0.1, 0.5]}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    (folder / "cards").mkdir()
    table = (folder / "t.csv").read_bytes()
    card = {"name": "toy", "description": "a toy", "reader": {"kind": "table", "header": True}, "target": "y",
            "columns": {"a": {"bounds": [0, 1]}, "b": {"values": ["u", "v"]}, "y": {}}, "split": {"test": 8},
            "classes": {"c0": ["c0"], "other": ["*"]}, "preprocess": [{"scale": {}}, {"one-hot": {}}],
            "files": [{"name": "t.csv", "records": 48, "sha256": hashlib.sha256(table).hexdigest()}]}  # fmt: skip
    (folder / "cards" / "toy.yaml").write_text(yaml.safe_dump(card))
    make_own(folder)


def make_own(folder: Path) -> None:
    """Write a recipe that keeps more state (`own.yaml`), its finished result in `out`, and its checkpoint in `stopped`.

    Its preprocessing releases statistics; its optimizer and its averaging have a state.
    """
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

    with contextlib.suppress(RunError):  # interrupted, so that a checkpoint is left
        loop.run(resolve_auto(loaded), loop.Options(folder / "stopped", progress=stop))


def own_result(folder: Path) -> Path:
    """Return the folder of the result of `own.yaml`."""
    (place,) = (path for path in (folder / "out").iterdir() if path.is_dir())
    return place


def checkpoint_in(folder: Path) -> Path:
    """Return the checkpoint of the interrupted training of `own.yaml`."""
    (place,) = (folder / "stopped").glob(".*.checkpoint")
    return place


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Some spans of it replaced, doubled, cut or turned over."""
    for _ in range(rng.choice([1, 1, 1, 3, 8])):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice([0, 1, 1, 4, 20, 200]))
        new = rng.choice([rng.choice(_TOKENS), rng.randbytes(rng.choice([1, 4])), content[at:end] * 2])
        content = content[:at] if rng.random() < 0.05 else content[:at] + new + content[end:]
    return content


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a nested value, the whole first (its path is empty)."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a nested value with the part at `path` replaced, or removed by `GONE`; tuples stay tuples.

    A `new` that is a function is called with the old part.
    """
    if not path:
        return new(value) if callable(new) else copy.deepcopy(new) if new is not GONE else GONE
    (key, *rest) = path
    part = changed(value[key], tuple(rest), new)
    if isinstance(value, dict):
        return {k: part if k == key else v for k, v in value.items() if k != key or part is not GONE}
    made = [part if i == key else v for i, v in enumerate(value) if i != key or part is not GONE]
    return tuple(made) if isinstance(value, tuple) else made


def mutated(rng: random.Random, value: Any) -> Any:
    """Return plain data or tensors with one place, at any depth, replaced, removed or added to."""
    everywhere = list(places(value))
    top = [path for path in everywhere if len(path) == 1]
    new = changed(value, rng.choice(top if top and rng.random() < 0.3 else everywhere), lambda old: _other(rng, old))
    return None if new is GONE else new


def _other(rng: random.Random, value: Any) -> Any:
    """Return something else in place of a part: one of `ODD`, or what only a part of its type can become."""
    options: list[Any] = [[value], _nested(value, 200), str(value)[:1000], rng.uniform(-1e3, 1e3)]
    if isinstance(value, torch.Tensor):
        options += [value[None], value.flatten()[: value.numel() // 2], value.to(torch.int64), [value, value],
                    value.new_full(value.shape, float("nan")) if value.is_floating_point() else value - 9]  # fmt: skip
    elif isinstance(value, dict):
        options += [value | {"more": value}, value | {str(rng.choice(ODD))[:20]: rng.choice(ODD[1:])}]
    elif isinstance(value, str):
        options += [value[: len(value) // 2], value * 2]
    elif isinstance(value, list | tuple) and value:
        at = rng.randrange(len(value))
        options += [value[: len(value) // 2], value * 2, [*value[:at], value[at], *value[at:]]]
    elif isinstance(value, int | float):
        options += [-value, value + 1, value * 2]
        with contextlib.suppress(OverflowError):
            options.append(value * 1e6)
    return rng.choice(options if rng.random() < 0.4 else ODD)


def _nested(value: Any, depth: int) -> Any:
    return value if depth == 0 else [_nested(value, depth - 1)]


def _change(rng: random.Random, path: Path) -> None:
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))


def _change_yaml(rng: random.Random, path: Path) -> None:
    if rng.random() < 0.4:
        return _change(rng, path)
    content = yaml.safe_load(path.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        content = mutated(rng, content)
    return _write(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=rng.random() < 0.5))


def _change_word(rng: random.Random, path: Path) -> None:
    """Replace or empty one word of a line, drop the line or double it."""
    separator = "," if path.suffix == ".csv" else " "
    lines = path.read_text().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    words = lines[at].split(separator)
    place = rng.randrange(len(words))
    new = _other(rng, words[place])
    words[place] = "" if new is GONE else json.dumps(new) if rng.random() < 0.5 else str(new)[:10_000]
    lines[at] = rng.choice([separator.join(words)] * 3 + ["", lines[at] * 2])
    _write(path, "".join(lines))


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _recipe(rng: random.Random, folder: Path) -> list[str]:
    name = rng.choice(["tiny.yaml", "csv.yaml", "jsonl.yaml"])
    _change_yaml(rng, folder / name)
    return rng.choice([["recipe", "validate", name], ["recipe", "show", name], ["train", name, "--dry-run"],
                       ["account", name], ["recipe", "check-model", name]])  # fmt: skip


def _override(rng: random.Random, folder: Path) -> list[str]:
    """Override a key that the recipe has, or any key of the schema."""
    if rng.random() < 0.5:
        keys = [*rng.choice(sorted(expected.key_paths(expected.schema_of(Recipe), None), key=str))]
    else:
        content, keys = yaml.safe_load((folder / "tiny.yaml").read_text()), []
        while isinstance(content, dict) and content and rng.random() < 0.95:
            keys.append(rng.choice(list(content)))
            content = content[keys[-1]]
    value = rng.choice([json.dumps(rng.choice(ODD[1:])), str(rng.choice(_VALUES))])
    command, options = rng.choice([(["train", "tiny.yaml"], ["--dry-run"]), (["account", "tiny.yaml"], []),
                                   (["account", "tiny.yaml"], ["--accountant", "rdp", "--accountant", "gaussian"]),
                                   (["recipe", "show", "tiny.yaml"], [])])  # fmt: skip
    return [*command, f"{'.'.join(map(str, keys))}={value}", *options]


def _foreign(rng: random.Random, folder: Path) -> list[str]:
    """Give something that was never in order: bytes, text of a few cells, or arrays of any kind."""
    ending = rng.choice([".yaml", ".jsonl", ".csv", ".csv.gz", ".npz", ".npy", ".parquet"])
    path = folder / f"foreign{ending}"
    if ending == ".npz" and rng.random() < 0.6:
        names = rng.sample(["x", "y", "x_test", "y_test"], rng.randrange(1, 5))
        np.savez(path, **{name: rng.choice(_ARRAYS) for name in names})  # type: ignore[arg-type]
    elif ending == ".csv" and rng.random() < 0.6:
        lines = [",".join(rng.choices(_CELLS, k=rng.randrange(5))) for _ in range(rng.randrange(7))]
        path.write_text("\n".join(lines))
    else:
        parts = [rng.choice([rng.choice(_TOKENS), rng.randbytes(rng.randrange(20))]) for _ in range(rng.randrange(6))]
        path.write_bytes(b"".join(parts))
    if ending == ".yaml":
        return rng.choice([["train", path.name], ["account", path.name], ["sweep", path.name]])
    if ending == ".jsonl" and rng.random() < 0.5:
        return ["account", path.name]
    target = "x.npy" if ending == ".npy" else "y"
    data = json.dumps({"path": path.name, "target": target, "classes": [0, 1], "bounds": [0, 1]})
    return ["train", "tiny.yaml", "--dry-run", f"data={data}"]


def _table(rng: random.Random, folder: Path) -> list[str]:
    ending = rng.choice(["csv", "jsonl"])
    _change(rng, folder / f"t.{ending}")
    return rng.choice([["train", f"{ending}.yaml", "--out", "out"], ["train", f"{ending}.yaml", "--dry-run"],
                       ["recipe", "new", f"t.{ending}", "--target", "y"]])  # fmt: skip


def _arrays(rng: random.Random, folder: Path) -> list[str]:
    name, command = rng.choice(
        [
            ("tiny.npz", ["train", "tiny.yaml", "--out", "out"]),
            ("tiny.npz", ["recipe", "new", "tiny.npz", "--target", "y"]),
            ("tiny.npz", ["evaluate", "result"]),
            ("x.npy", ["predict", "result", "x.npy"]),
        ]
    )
    _change(rng, folder / name)
    return command


def _card(rng: random.Random, folder: Path) -> list[str]:
    _change_yaml(rng, folder / "cards" / "toy.yaml")
    return ["data", *rng.choice([["list"], ["verify", "toy"]]), "--cards", "cards"]


def _ledger(rng: random.Random, folder: Path) -> list[str]:
    path = folder / "result" / "ledger.jsonl"
    if rng.random() < 0.5:
        _change(rng, path)
    elif rng.random() < 0.4:
        odd = {key: rng.choice(ODD[1:]) for key in rng.sample(_LINE_KEYS, rng.randrange(4))}
        _write(path, json.dumps(rng.choice([{}, _LINE]) | odd) + "\n")
    else:
        lines = mutated(rng, [json.loads(line) for line in path.read_text().splitlines()])
        _write(path, "".join(f"{json.dumps(one)}\n" for one in (lines if isinstance(lines, list) else [lines])))
    return ["account", str(path.relative_to(folder)), *rng.choice([[], ["--trials", "all"], ["--group", "2"]])]


def seal(place: Path, document: Any) -> None:
    """Write a result's `result.json`, with renewed hashes of itself and of the files beside it."""
    if isinstance(document, dict):
        names = [*reading.WITH_EVERY_RESULT, "model.safetensors"]
        files = {name: (place / name).read_bytes() for name in names}
        for of in (files, None):
            with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):  # changed beyond sealing
                document = reading.sealed(document, of)
                break
    _write(place / "result.json", json.dumps(document))


def _read_of(rng: random.Random, place: Path, folder: Path) -> list[str]:
    """Return a command that reads the result at `place`."""
    own = place.name != "result"
    name, rows, other = str(place.relative_to(folder)), "own.csv" if own else "x.npy", str(own_result(folder))
    return rng.choice([["account", name], ["account", name, "--trials", "all"], ["report", name],
                       ["report", name, "--publish", "published"], ["evaluate", name], ["predict", name, rows],
                       ["evaluate", name, "own.csv"], ["predict", name, rows, "--probabilities"],
                       ["compare", name, "--out", "compared"], ["compare", name, "result" if own else other],
                       ["train", "own.yaml" if own else "tiny.yaml", "--out", "out" if own else "."]])  # fmt: skip


def _result(rng: random.Random, folder: Path) -> list[str]:
    """Change a result, with hashes that fit again or as it comes."""
    place = rng.choice([folder / "result", own_result(folder)])
    name = rng.choice(["result.json", "result.json", "trials.csv", "history.csv", "recipe.yaml", "ledger.jsonl"])
    document = json.loads((place / "result.json").read_text())
    if name == "result.json":
        document = mutated(rng, document)
    else:
        rng.choice([_change, _change_word])(rng, place / name)
    if rng.random() < 0.7:
        seal(place, document)
    else:
        _write(place / "result.json", json.dumps(document))
    return _read_of(rng, place, folder)


def _model(rng: random.Random, folder: Path) -> list[str]:
    """Change the bytes of a model file, or what it holds."""
    place = rng.choice([folder / "result", own_result(folder)])
    path, document = place / "model.safetensors", json.loads((place / "result.json").read_text())
    if rng.random() < 0.3:
        _change(rng, path)
    else:
        held = mutated(rng, {"about": bundle.read(path).about, "tensors": load_file(path)})
        with contextlib.suppress(AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # cannot be written
            tensors = {name: tensor.contiguous() for name, tensor in held["tensors"].items()}
            save_file(tensors, path, {"dpsgd": json.dumps(held["about"])})
    if rng.random() < 0.3:
        (place / "result.json").unlink()  # nothing but a model and its recipe: no hash to fail first
    else:
        seal(place, document)
    return _read_of(rng, place, folder)


def _checkpoint(rng: random.Random, folder: Path) -> list[str]:
    """Change the bytes of a checkpoint, or what it holds."""
    path = checkpoint_in(folder)
    if rng.random() < 0.3:
        _change(rng, path)
    else:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError, RecursionError):  # cannot be written
            checkpoint.save(path, mutated(rng, checkpoint.load(path)))
    return rng.choice([["train", "own.yaml", "--out", "stopped", "--resume"],
                       ["train", "own.yaml", "--out", "stopped", "--finish"],
                       ["account", str(path.relative_to(folder))]])  # fmt: skip


def _sweep(rng: random.Random, folder: Path) -> list[str]:
    _change_yaml(rng, folder / "sweep.yaml")
    return ["sweep", "sweep.yaml", "--dry-run"]


def _options(rng: random.Random, folder: Path) -> list[str]:
    del folder
    given = rng.sample(_FLAGS, rng.randrange(1, 5))
    usual = ["--noise-multiplier", "4", "--sampling-rate", "0.01", "--steps", "100"] if rng.random() < 0.6 else []
    return ["account", *usual, *(text for flag in given for text in (flag, rng.choice(_VALUES)))]


KINDS: dict[str, Callable[[random.Random, Path], list[str]]] = {
    "recipe": _recipe, "override": _override, "foreign": _foreign,
    "table": _table, "arrays": _arrays, "card": _card, "ledger": _ledger,
    "result": _result, "model": _model, "checkpoint": _checkpoint, "sweep": _sweep, "options": _options,
}  # fmt: skip


def run_case(number: int, inputs: Path, folder: Path) -> Case:
    """Case `number` on a copy of `inputs`, which is made at `folder`, where the command runs."""
    rng = random.Random(f"dpsgd {number}")
    kind = list(KINDS)[number % len(KINDS)]
    shutil.copytree(inputs, folder)
    arguments = KINDS[kind](rng, folder)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    begun, wrong = time.perf_counter(), None
    try:
        wrong = fault(folder, arguments)
    except Hang:
        wrong = f"takes more than {LIMIT_SECONDS:g} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Case(number, kind, arguments, folder, wrong, time.perf_counter() - begun)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Hang


def plain(inputs: Path, folder: Path, arguments: list[str]) -> Result:
    """The answer to a command on a copy of `inputs` as they are."""
    shutil.copytree(inputs, folder)
    return run_in(folder, arguments)


def run_in(folder: Path, arguments: list[str]) -> Result:
    """The answer to a command in `folder`."""
    with contextlib.chdir(folder):
        return CliRunner().invoke(main, arguments, color=True)


def fault(folder: Path, arguments: list[str]) -> str | None:
    """Run a command in `folder` and return what is wrong with the answer, None if nothing is."""
    found = run_in(folder, arguments)
    said = found.output
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return f"{type(found.exception).__name__}: {found.exception}"
    if found.exit_code not in (0, 1, 2):
        return f"exit code {found.exit_code}: {said[-300:]}"
    if "bug of ours" in said or "Traceback" in said:
        return said[-500:]
    return None if visible(said) == said else f"shows {said!r}"[:500]


def run_all(cases: range, keep: Path | None) -> int:
    """Run the cases, a line for each that fails; returns how many."""
    failed, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as place:
        tempfile.tempdir = place  # of reports on what nobody foresaw, too
        inputs = Path(place) / "inputs"
        inputs.mkdir()
        make_inputs(inputs)
        for number in cases:
            faulthandler.dump_traceback_later(20 * LIMIT_SECONDS, exit=True)
            case = run_case(number, inputs, Path(place) / f"case-{number}")
            slowest = max(slowest, case.seconds)
            if case.wrong is not None:
                failed += 1
                print(f"case {number} ({case.kind}): dpsgd {' '.join(map(repr, case.arguments))}\n    {case.wrong}")
                if keep is not None:
                    shutil.copytree(case.folder, keep / f"case-{number}", dirs_exist_ok=True)
            shutil.rmtree(case.folder)
            if number % 500 == 499:
                print(f"{number + 1} cases, {failed} failed, the slowest took {slowest:.1f} s", file=sys.stderr)
    tempfile.tempdir = None
    faulthandler.cancel_dump_traceback_later()
    return failed


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    failed = run_all(range(given.first, given.first + given.cases), given.keep)
    print(f"{given.cases} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_main())
