"""Mutated inputs through the command: each gets an answer or an error of ours, in time. `make fuzz`, seeds fixed.

Case n is a function of its number alone. It changes one input (a recipe, an override, a table, JSON lines, arrays, a
card, a ledger, a result with renewed hashes or without, a checkpoint, a model, a sweep, the value of an option) and
calls one command on it, in this process. It fails with an exception, "a bug of ours", a character that a terminal would
obey, an exit code other than 0, 1 and 2, or after `LIMIT_SECONDS`. The files of a failed case stay in `--keep DIR`.

    python -m tests.fuzz --cases 5000 [--first N] [--keep DIR]
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.common.text_format import visible
from dpsgd_cli.errors import RunError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import reading
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import recipe_writer

LIMIT_SECONDS = 30.0
_MOST_MEMORY = 24 << 30
ODD: list[Any] = [
    *(None, True, 0, -1, 1, 2**63, 10**300, 1e308, 1e-320, float("inf"), float("nan"), -0.0, [], {}, [[]], {"a": 1}),
    *(
        "",
        "a",
        "auto",
        "=cmd()",
        "\x1b[31m",
        "\u202e",
        "..",
        "/",
        "x" * 3000,
        "\u0000",
        "1e400",
        "2020-01-01",
        "~",
        "é",
    ),
]
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
          "--batching", "--adjacency", "--largest-batch", "--max-epsilon", "--target-rho", "--law"]  # fmt: skip
_VALUES = ["0", "1", "-1", "nan", "inf", "-inf", "1e308", "1e-320", "0.01", "1/0", "600/60000", "", "all", "zcdp",
           "rdp", "poisson", "shuffle", "order=2:8:1", "delta=.1:.2:.1", "noise-multiplier", "steps", "10", "\x1b",
           "9" * 40]  # fmt: skip


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
    """Inputs that are in order, one of each kind, small enough that a case takes a moment."""
    write = recipe_writer(folder)
    own = {"repeats": 1, "epochs": 2}
    (folder / "half.yaml").write_bytes(write(**own).read_bytes())
    loaded = load_recipe(str(folder / "half.yaml"))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(RunError):  # interrupted, so that a checkpoint is left
        loop.run(resolve_auto(loaded), loop.Options(folder / "half", progress=stop))
    done = loop.run(resolve_auto(loaded), loop.Options(folder, save_models=True))
    done.rename(folder / "result")
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


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Some spans of it replaced, doubled, cut or turned over."""
    for _ in range(rng.choice([1, 1, 1, 3, 8])):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice([0, 1, 1, 4, 20, 200]))
        new = rng.choice([rng.choice(_TOKENS), rng.randbytes(rng.choice([1, 4])), content[at:end] * 2])
        content = content[:at] if rng.random() < 0.05 else content[:at] + new + content[end:]
    return content


def mutated(rng: random.Random, value: Any) -> Any:
    """Plain data with one place, at any depth, replaced, removed or added to."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.12:
            return {name: inner for name, inner in value.items() if name != key}
        if rng.random() < 0.08:
            return value | {str(rng.choice(ODD))[:20]: rng.choice(ODD)}
        return value | {key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], *rng.choice([[mutated(rng, value[at])], [], [value[at]] * 2]), *value[at + 1 :]]
    if isinstance(value, int | float) and rng.random() < 0.3:
        return rng.choice([-value, value + 1, value * 1e6, str(value), [value]])
    return rng.choice(ODD)


def _change(rng: random.Random, path: Path) -> None:
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))


def _change_yaml(rng: random.Random, path: Path) -> None:
    if rng.random() < 0.4:
        return _change(rng, path)
    content = yaml.safe_load(path.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        content = mutated(rng, content)
    path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=rng.random() < 0.5))
    return None


def _recipe(rng: random.Random, folder: Path) -> list[str]:
    name = rng.choice(["tiny.yaml", "csv.yaml", "jsonl.yaml"])
    _change_yaml(rng, folder / name)
    return rng.choice([["recipe", "validate", name], ["recipe", "show", name], ["train", name, "--dry-run"],
                       ["account", name], ["recipe", "check-model", name]])  # fmt: skip


def _override(rng: random.Random, folder: Path) -> list[str]:
    content, keys = yaml.safe_load((folder / "tiny.yaml").read_text()), []
    while isinstance(content, dict) and content and rng.random() < 0.95:
        keys.append(rng.choice(list(content)))
        content = content[keys[-1]]
    value = rng.choice([json.dumps(rng.choice(ODD)), str(rng.choice(_VALUES))])
    command = rng.choice(
        [["train", "tiny.yaml", "--dry-run"], ["account", "tiny.yaml"], ["recipe", "show", "tiny.yaml"]]
    )
    return [*command, f"{'.'.join(keys)}={value}"]


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


_RESULT = [["account", "result"], ["report", "result"], ["evaluate", "result"], ["predict", "result", "x.npy"],
           ["compare", "result", "--out", "out"], ["report", "result", "--publish", "out"],
           ["account", "result", "--trials", "all"], ["train", "half.yaml", "--out", "result"]]  # fmt: skip


def _ledger(rng: random.Random, folder: Path) -> list[str]:
    path = folder / "result" / "ledger.jsonl"
    if rng.random() < 0.5:
        _change(rng, path)
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        changed = mutated(rng, lines)
        path.write_text(
            "".join(f"{json.dumps(one)}\n" for one in (changed if isinstance(changed, list) else [changed]))
        )
    return ["account", str(path.relative_to(folder)), *rng.choice([[], ["--trials", "all"], ["--group", "2"]])]


def _result(rng: random.Random, folder: Path) -> list[str]:
    """With hashes that fit again, or as it comes."""
    place = folder / "result"
    name = rng.choice(["result.json", "result.json", "trials.csv", "history.csv", "recipe.yaml", "ledger.jsonl"])
    document = json.loads((place / "result.json").read_text())
    if name == "result.json":
        document = mutated(rng, document)
    else:
        _change(rng, place / name)
    if rng.random() < 0.7 and isinstance(document, dict):
        try:
            files = {file: (place / file).read_bytes() for file in (*reading.WITH_EVERY_RESULT, "model.safetensors")}
            document = reading.sealed(document, files if name != "result.json" else None)
        except (KeyError, TypeError, AttributeError, ValueError):
            pass  # changed beyond sealing
    (place / "result.json").write_text(json.dumps(document))
    return rng.choice(_RESULT)


def _model(rng: random.Random, folder: Path) -> list[str]:
    _change(rng, folder / "result" / "model.safetensors")
    if rng.random() < 0.7:
        (folder / "result" / "result.json").unlink()  # nothing but a model and its recipe: no hash to fail first
    return rng.choice(
        [["predict", "result", "x.npy"], ["predict", "result", "x.npy", "--probabilities"], ["evaluate", "result"]]
    )


def _checkpoint(rng: random.Random, folder: Path) -> list[str]:
    for path in (folder / "half").glob(".*.checkpoint"):
        _change(rng, path)
    return ["train", "half.yaml", "--out", "half", "--resume"]


def _sweep(rng: random.Random, folder: Path) -> list[str]:
    _change_yaml(rng, folder / "sweep.yaml")
    return ["sweep", "sweep.yaml", "--dry-run"]


def _options(rng: random.Random, folder: Path) -> list[str]:
    del folder
    given = rng.sample(_FLAGS, rng.randrange(1, 5))
    usual = ["--noise-multiplier", "4", "--sampling-rate", "0.01", "--steps", "100"] if rng.random() < 0.6 else []
    return ["account", *usual, *(text for flag in given for text in (flag, rng.choice(_VALUES)))]


KINDS: dict[str, Callable[[random.Random, Path], list[str]]] = {
    "recipe": _recipe, "override": _override, "table": _table, "arrays": _arrays, "card": _card, "ledger": _ledger,
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
        wrong = _wrong(folder, arguments)
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
    return _answer(folder, arguments)


def _answer(folder: Path, arguments: list[str]) -> Result:
    with contextlib.chdir(folder):
        return CliRunner().invoke(main, arguments, color=True)


def _wrong(folder: Path, arguments: list[str]) -> str | None:
    found = _answer(folder, arguments)
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
