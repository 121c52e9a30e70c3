"""What the docstring of each registry promises: one of each kind is added to a copy of the house, by the one new
file or the one edited file that the promise names, and then trained, priced, compared and swept like those of old.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
ROWS = "".join(f"{i % 7},{'yes' if i % 7 > 3 else 'no'}\n" for i in range(60))


@dataclass(frozen=True)
class Addition:
    """One thing more: `files` that are new, and what is put before a line of the one file that is `edited`."""

    files: dict[str, str] = field(default_factory=dict)
    edited: str | None = None
    edits: dict[str, str] = field(default_factory=dict)

    def make(self, house: Path) -> None:
        for name, text in self.files.items():
            assert not (house / name).exists()
            (house / name).parent.mkdir(exist_ok=True)
            (house / name).write_text(text, encoding="utf-8")
        if self.edited is not None:
            text = (house / self.edited).read_text(encoding="utf-8")
            for line, more in self.edits.items():
                assert text.count(line) == 1, f"{self.edited} has not one {line!r}"
                text = text.replace(line, more + line)
            (house / self.edited).write_text(text, encoding="utf-8")


ADDITIONS = {
    # schedules/settings.py: "A kind of schedule is one class here, and its name in the union `Schedule`"
    "schedule": Addition(
        edited="dpsgd_cli/schedules/settings.py",
        edits={
            "Schedule = Annotated[": (
                "class Halving(NoiseSchedule):\n"
                "    adaptive, follows_initial = False, True\n"
                "    kind: Literal['halving'] = 'halving'\n"
                "    initial: Noise = Field(description='Noise multiplier of epoch 0.')\n\n"
                "    def noise(self, epoch: int) -> float:\n"
                "        return _known(self.initial) / 2**epoch\n\n\n"
            ),
            "PythonSchedule | Validation,": "Halving | ",
        },
    ),
    # clipping/settings.py: "A kind is one class here, and its name in the union `Clipping`"; where its factors are
    # new, too, it names their function
    "clipping kind": Addition(
        files={
            "dpsgd_cli/engine/halfway.py": (
                "def almost_to_the_bound(bounds, norms):\n"
                "    print('clipped halfway')\n"
                "    return bounds / (norms + 0.01)\n"
            )
        },
        edited="dpsgd_cli/clipping/settings.py",
        edits={
            "Clipping = Annotated[": (
                "class HalfwayClipping(FlatClipping):\n"
                "    factors = 'dpsgd_cli.engine.halfway:almost_to_the_bound'\n"
                "    held = FlatClipping.held\n"
                "    plain, in_units, moves = True, False, False\n"
                "    kind: Literal['halfway'] = 'halfway'\n\n\n"
            ),
            "FlatClipping | PerLayerClipping |": "HalfwayClipping | ",
        },
    ),
    # engine/loss_bounds.py: "its name in `Loss`, its record in `LOSSES`, and a class of `MarginLoss`"
    "convex loss": Addition(
        files={
            "dpsgd_cli/methods/risks/squared_hinge.py": (
                "import torch\n\n"
                "from dpsgd_cli.engine.losses import MarginLoss\n\n\n"
                "class SquaredHinge(MarginLoss):\n"
                "    def value(self, t):\n        return (1 - t).clamp_min(0).square() / 2\n\n"
                "    def slope(self, t):\n        return -(1 - t).clamp_min(0)\n\n"
                "    def curvature(self, t):\n        return (t < 1).to(t.dtype)\n"
            )
        },
        edited="dpsgd_cli/engine/loss_bounds.py",
        edits={
            '"logistic", "hinge", "huber-svm", "squared", "huber", "quantile"]': '"squared-hinge", ',
            '    "squared": LossKind(': (
                '    "squared-hinge": LossKind(\n'
                "        runs='dpsgd_cli.methods.risks.squared_hinge:SquaredHinge',\n"
                "        residual=False,\n"
                "        slope=lambda region: 1 + region.reach,\n"
                "        curvature=lambda region: 1.0,\n"
                "        probabilities=False,\n"
                "    ),\n"
            ),
        },
    ),
    # engine/metrics.py: "To add one that is a mean over records, add an entry."
    "metric": Addition(
        edited="dpsgd_cli/engine/metrics.py",
        edits={
            '    "loss": Metric(': '    "wrong": Metric(("classification",), "share of wrong answers", True,'
            " lambda outputs, labels: 1.0 - right_answers(outputs, labels).float()),\n"
        },
    ),
    # accounting/accountants/__init__.py: "To add one: a file beside this one and a line here. Nothing else lists them."
    "accountant": Addition(
        files={
            "dpsgd_cli/accounting/accountants/generous.py": (
                "from dpsgd_cli.accounting.accountants.additive import Gaussian\n\n"
                "class Generous(Gaussian):\n"
                "    name, bound, note = 'generous', 'upper', 'one more than gaussian'\n"
                "    def epsilon(self, releases, delta):\n        return super().epsilon(releases, delta) + 1\n"
            )
        },
        edited="dpsgd_cli/accounting/accountants/__init__.py",
        edits={
            '    "gaussian": ': (
                '    "generous": AccountantEntry(runs="generous:Generous", usual=True, in_recipes=True),\n'
            )
        },
    ),
    # ARCHITECTURE: "a section ..., its name in the union `Optimizer`, and the class that it names"
    "optimizer": Addition(
        files={
            "dpsgd_cli/methods/dp_sgd/signs.py": (
                "from dpsgd_cli.methods.dp_sgd.optimizers import Update\n\n\n"
                "class SignUpdate(Update):\n"
                "    def __init__(self, settings, values):\n        super().__init__()\n\n"
                "    def apply(self, values, gradient, learning_rate, step):\n"
                "        print('stepped by signs')\n"
                "        values.addcmul_(gradient.sign(), learning_rate, value=-1.0)\n"
            )
        },
        edited="dpsgd_cli/methods/dp_sgd/settings.py",
        edits={
            "Optimizer = Annotated[": (
                "class SignSettings(OptimizerKind):\n"
                "    made = 'dpsgd_cli.methods.dp_sgd.signs:SignUpdate'\n"
                "    kind: Literal['sign'] = 'sign'\n\n\n"
            ),
            "SgdSettings | AdamSettings | AdamWSettings, Field(": "SignSettings | ",
        },
    ),
    # engine/layers/__init__.py: "One file per layer rule; `RULES` is the registry"
    "layer rule": Addition(
        files={
            "dpsgd_cli/engine/layers/gain.py": (
                "import torch\n"
                "from torch import nn\n\n"
                "from dpsgd_cli.engine.layers.base import OWN_GRADIENTS, Instantiated\n\n\n"
                "class GainedSum(nn.Module):\n"
                "    def __init__(self, features):\n"
                "        super().__init__()\n"
                "        self.gain = nn.Parameter(torch.ones(features))\n\n"
                "    def forward(self, x):\n        return x * self.gain\n\n\n"
                "class Gain(Instantiated):\n"
                "    kinds = (GainedSum,)\n"
                "    clipped = OWN_GRADIENTS\n"
                "    holds_gradients = True\n"
                "    rounds = True\n\n"
                "    def compute(self, a):\n        return a * self.values['gain'][:, None]\n\n"
                "    def input_gradient(self, a, d):\n        return d * self.values['gain'][:, None]\n\n"
                "    def per_example(self):\n"
                "        print('ruled by a new rule')\n"
                "        return {'gain': sum(a * d for a, d in self.recorded())}\n"
            )
        },
        edited="dpsgd_cli/engine/layers/__init__.py",
        edits={
            "RULES: tuple[": "from dpsgd_cli.engine.layers.gain import Gain\n\n",
            "Linear, Conv, Embedding, Normalised, Affine, Standardised, Offset)": "Gain, ",
        },
    ),
    # ARCHITECTURE: "a field of `TableFormat`, and its line in `_options`"
    "table option": Addition(
        edited="dpsgd_cli/data/column_settings.py",
        edits={"    header: bool = Field(": "    quote: Mark = Field('\"', description='Around a cell.')\n"},
    ),
    "table option as it is read": Addition(
        edited="dpsgd_cli/data/table_files.py",
        edits={"        delimiter=written.separator,": "        quote_char=written.quote,\n"},
    ),
    # ARCHITECTURE: "its entry in `FILES`"
    "result file": Addition(
        edited="dpsgd_cli/results/reading.py",
        edits={
            "    # beside the weights, it holds": (
                '    "name.txt": ResultFile(unreleased="never", always=False, lines=True,\n'
                '                           content=lambda found: f"{found.name}\\n".encode()),\n'
            )
        },
    ),
    # main.py: "Each command is a file in `cli/`", and its line in `COMMANDS`
    "command": Addition(
        files={
            "dpsgd_cli/cli/greet.py": (
                "import click\n\n\n@click.command('greet')\ndef command():\n    click.echo('good morning')\n"
            )
        },
        edited="dpsgd_cli/main.py",
        edits={'    "data": (': '    "greet": ("dpsgd_cli.cli.greet", "Say good morning."),\n'},
    ),
    # sweep/launchers.py: "To add one, write a function here and add a line to `LAUNCHERS`"
    "launcher": Addition(
        edited="dpsgd_cli/sweep/launchers.py",
        edits={
            "LAUNCHERS: dict": (
                "def backwards(run, jobs, resources):\n"
                "    print('launched backwards')\n"
                "    return map(run, reversed(jobs))\n\n"
            ),
            '    "slurm": ': '    "backwards": (backwards, None),\n',
        },
    ),
    # DESIGN: "datasets/ one YAML card per data set"
    "data set": Addition(
        files={
            "datasets/weekdays.yaml": yaml.safe_dump(
                {
                    "name": "weekdays",
                    "description": "sixty days, at work or not",
                    "homepage": "https://example.org/weekdays",
                    "licence": "none",
                    "citation": "none",
                    "reader": {"kind": "table", "separator": ",", "header": False},
                    "files": [{"name": "days.csv", "records": 60, "sha256": hashlib.sha256(ROWS.encode()).hexdigest()}],
                    "columns": {"day": {"bounds": [0, 7]}, "free": {}},
                    "target": "free",
                    "classes": {"no": ["no"], "yes": ["yes"]},
                    "split": {"test": 12},
                    "preprocess": [{"scale": {}}],
                }
            )
        }
    ),
    # methods/descriptor.py: "a section with a descriptor, and its name in the union `Method`
    # (`methods/settings.py`); a class of `dpsgd_cli.methods.base.Method` that runs it"
    "method": Addition(
        files={
            "dpsgd_cli/methods/halved/__init__.py": "",
            "dpsgd_cli/methods/halved/run.py": (
                "from dpsgd_cli.methods.dp_sgd.run import DpSgd\n\n"
                "class Halved(DpSgd):\n"
                "    def learning_rates(self, epoch):\n"
                "        return [rate / 2 for rate in super().learning_rates(epoch)]\n"
            ),
            "dpsgd_cli/methods/halved/settings.py": (
                "from typing import Literal\n\n"
                "from dpsgd_cli.methods.descriptor import EVERY_NEIGHBOUR, ITS_TRAINING, Descriptor\n"
                "from dpsgd_cli.methods.dp_sgd.settings import Gradient\n\n\n"
                "class HalvedMethod(Gradient):\n"
                "    descriptor = Descriptor(\n"
                "        runs='dpsgd_cli.methods.halved.run:Halved',\n"
                "        planner='dpsgd_cli.methods.dp_sgd.price:gradient',\n"
                "        privacy='needed',\n"
                "        adjacencies=EVERY_NEIGHBOUR,\n"
                "        only_convex=False,\n"
                "        per_trial_keys=ITS_TRAINING,\n"
                "    )\n"
                "    kind: Literal['halved-dp-sgd'] = 'halved-dp-sgd'\n"
            ),
        },
        edited="dpsgd_cli/methods/settings.py",
        edits={
            "Method = Annotated[\n": "from dpsgd_cli.methods.halved.settings import HalvedMethod\n\n",
            "    | DpSgdMethod\n": "    | HalvedMethod\n",
        },
    ),
}

RECIPE: dict[str, Any] = {
    "name": "new",
    "data": {"name": "weekdays"},
    "model": {"kind": "linear"},
    "method": {"kind": "halved-dp-sgd", "batching": "full", "learning_rate": 1},
    "privacy": {
        "clipping": {"kind": "halfway", "norm": 0.5},
        "schedule": {"kind": "halving", "initial": "auto"},
        "budget": {"epsilon": 3, "delta": 1e-5},
        "accountant": "generous",
    },
    "epochs": 3,
    "seed": 0,
    "repeats": 2,
}
PLAIN = RECIPE | {"name": "plain", "method": RECIPE["method"] | {"kind": "dp-sgd"}}
PLAIN["privacy"] = {"budget": {"epsilon": 2, "delta": 1e-5}}
LOSS: dict[str, Any] = {
    "name": "loss",
    "data": {"name": "weekdays"},
    "model": {"kind": "convex", "loss": "squared-hinge", "radius": 3},
    "method": {"kind": "output-perturbation", "steps": 10},
    "privacy": {"budget": {"epsilon": 2, "delta": 1e-5}},
    "seed": 0,
}
RULED: dict[str, Any] = {
    "name": "ruled",
    "data": {"name": "weekdays"},
    "model": {"kind": "python", "file": "gained.py"},
    "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.1, "optimizer": {"kind": "sign"}},
    "privacy": {"clipping": {"kind": "flat", "norm": 0.5}, "budget": {"epsilon": 2, "delta": 1e-5}},
    "epochs": 1,
    "seed": 0,
}
QUOTED: dict[str, Any] = {
    "name": "quoted",
    "data": {
        "path": "quoted.csv",
        "target": "free",
        "classes": ["n,o", "yes"],
        "bounds": [0, 7],
        "format": {"separator": ",", "quote": "'"},
    },
    "model": {"kind": "linear"},
    "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.1},
    "privacy": {"budget": {"epsilon": 2, "delta": 1e-5}},
    "epochs": 1,
    "seed": 0,
}
GAINED = """
from torch import nn
from dpsgd_cli.engine.layers.gain import GainedSum

def build(input_shape, outputs):
    return nn.Sequential(GainedSum(*input_shape), nn.Linear(*input_shape, outputs))
"""
SWEEP = {"name": "both", "recipes": ["new.yaml"], "grid": {"method.kind": ["halved-dp-sgd", "dp-sgd"]}}

COMMANDS = {
    "train": ["train", "new.yaml", "--out", "trained"],
    "train with an optimizer and a layer": ["train", "ruled.yaml", "--trust-code", "--out", "ruled"],
    "greet": ["greet"],
    "train on a table with an option": ["train", "quoted.yaml", "--out", "quoted"],
    "train with a loss": ["train", "loss.yaml", "--out", "lost"],
    "account": ["account", "new.yaml", "--accountant", "generous", "--accountant", "gaussian", "--format", "json"],
    "account of the result": ["account", "trained", "--accountant", "generous", "--format", "json"],
    "compare": ["compare", "new.yaml", "plain.yaml", "--metric", "test_wrong", "--out", "out", "--report", "page.html"],
    "sweep": ["sweep", "both.yaml", "--launcher", "backwards", "--out", "swept"],
    "help of account": ["account", "new.yaml", "--accountant", "nobody"],
    "help of sweep": ["sweep", "run", "--help"],
    "schema": ["recipe", "schema"],
    "data": ["data", "list"],
    "wrong": ["train", "new.yaml", "method.kind=nothing", "--dry-run"],
}

# One process, so that torch is loaded once.
DRIVER = """
import contextlib, io, json, sys
from dpsgd_cli.main import main

said = {}
for name, arguments in json.load(sys.stdin).items():
    told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(told[0]), contextlib.redirect_stderr(told[1]):
        try:
            code = main(arguments, prog_name="dpsgd", standalone_mode=True)
        except SystemExit as stop:
            code = stop.code
    said[name] = [code, *(text.getvalue() for text in told)]
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the recipes; beside it the house with everything added, and the data."""
    root = tmp_path_factory.mktemp("registry")
    for folder in ("dpsgd_cli", "datasets", "recipes"):
        shutil.copytree(ROOT / folder, root / "house" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for addition in ADDITIONS.values():
        addition.make(root / "house")
    (root / "data" / "weekdays").mkdir(parents=True)
    (root / "data" / "weekdays" / "days.csv").write_text(ROWS)
    (root / "here").mkdir()
    for content in (RECIPE, PLAIN, LOSS, RULED, QUOTED, SWEEP):
        (root / "here" / f"{content['name']}.yaml").write_text(yaml.safe_dump(content))
    (root / "here" / "gained.py").write_text(GAINED)
    (root / "here" / "quoted.csv").write_text("day,free\n" + ROWS.replace("no", "'n,o'"))
    return root / "here"


@pytest.fixture(scope="module")
def said(place: Path) -> dict[str, Said]:
    """What each of COMMANDS said there, in order."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(COMMANDS),
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place.parent / "house"), "DPSGD_DATA": str(place.parent / "data")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {name: Said(*row) for name, row in json.loads(done.stdout).items()}


@pytest.mark.parametrize("command", [name for name in COMMANDS if name.partition(" ")[0] not in ("help", "wrong")])
def test_every_command_works_with_what_was_added(said: dict[str, Said], command: str) -> None:
    assert not said[command].code, said[command].err


def test_a_schedule_is_one_class_and_its_name(said: dict[str, Said], place: Path) -> None:
    """Its noise is applied, charged, and solved for where a number is `auto`."""
    (ledger,) = place.glob("trained/*/ledger.jsonl")
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    noise = [line["noise_multiplier"] for line in lines if line["trial"] == 0]
    assert noise == [pytest.approx(noise[0] / 2**epoch) for epoch in range(3)]
    assert "halving" in said["schema"].out


def test_a_clipping_kind_is_one_class_and_its_name(said: dict[str, Said]) -> None:
    """Its factors are those that gradients are multiplied by, and its bound is what is charged."""
    assert "clipped halfway" in said["train"].out
    assert "HalfwayClipping" in json.loads(said["schema"].out)["$defs"]


def test_a_convex_loss_is_one_class_and_a_record_with_its_bounds(said: dict[str, Said], place: Path) -> None:
    """By hand: L = (1 + R B) B and beta = B^2 with B^2 = 2, the constant column's 1 included, R = 3 and 48 records."""
    (ledger,) = place.glob("lost/*/ledger.jsonl")
    (line,) = [json.loads(line) for line in ledger.read_text().splitlines()]
    longest = (1 + 3 * 2**0.5) * 2**0.5
    assert line["sensitivity"] == pytest.approx(10 * longest / (2 * (1 + 1 / 48)) / 48)
    assert "squared-hinge" in said["schema"].out


@pytest.mark.parametrize(
    ("kind", "statement", "module"),
    [
        ("convex loss", "        slope=lambda region: 1 + region.reach,\n", "engine.loss_bounds"),
        ("convex loss", "        curvature=lambda region: 1.0,\n", "engine.loss_bounds"),
        ("schedule", "    adaptive, follows_initial = False, True\n", "schedules.settings"),
        ("clipping kind", "    plain, in_units, moves = True, False, False\n", "clipping.settings"),
        ("method", "        planner='dpsgd_cli.methods.dp_sgd.price:gradient',\n", "methods.halved.settings"),
        ("method", "        adjacencies=EVERY_NEIGHBOUR,\n", "methods.halved.settings"),
        ("optimizer", "    made = 'dpsgd_cli.methods.dp_sgd.signs:SignUpdate'\n", "methods.dp_sgd.settings"),
        ("layer rule", "    clipped = OWN_GRADIENTS\n", "engine.layers.gain"),
        ("accountant", ", in_recipes=True", "accounting.accountants"),
        ("accountant", "    name, bound, note = 'generous', 'upper', 'one more than gaussian'\n",
         "accounting.accountants.generous"),
    ],
)  # fmt: skip
def test_a_new_entry_that_leaves_out_a_statement_cannot_be_imported(
    place: Path, kind: str, statement: str, module: str
) -> None:
    """The package with everything added, from which one statement is taken away again."""
    addition, house = ADDITIONS[kind], place.parent / "house"
    texts = {**addition.files, str(addition.edited): "".join(addition.edits.values())}
    (file,) = [name for name, text in texts.items() if statement in text]
    whole = (house / file).read_text(encoding="utf-8")
    try:
        (house / file).write_text(whole.replace(statement, ""), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-B", "-c", f"import dpsgd_cli.{module}"],
            cwd=place,
            env={**os.environ, "PYTHONPATH": str(house)},
            capture_output=True,
            text=True,
        )
    finally:
        (house / file).write_text(whole, encoding="utf-8")
    assert done.returncode == 1
    assert "TypeError" in done.stderr.splitlines()[-1]


def test_a_metric_is_one_entry(said: dict[str, Said], place: Path) -> None:
    """It is measured, shown in words, and the less of it the better."""
    (result,) = place.glob("trained/*/result.json")
    metrics = json.loads(result.read_text())["metrics"]
    assert metrics["test_wrong"]["mean"] == pytest.approx(1 - metrics["test_accuracy"]["mean"])
    assert "test_wrong" in said["train"].out + said["train"].err
    assert "share of wrong answers" in said["compare"].out
    assert "test share of wrong answers" in (place / "page.html").read_text()


def test_an_accountant_is_one_file_and_one_line(said: dict[str, Said], place: Path) -> None:
    """It answers for what it supports, polices a recipe's budget, and is named where one is not known."""
    (result,) = place.glob("trained/*/result.json")
    privacy = json.loads(result.read_text())["privacy"]
    assert privacy["accountant"] == "generous" and 2.9 < privacy["epsilon"] <= 3
    rows = {row["accountant"]: row["epsilon"] for row in json.loads(said["account"].out)}
    assert rows["generous"] == pytest.approx(rows["gaussian"] + 1)
    of_result = json.loads(said["account of the result"].out)
    assert [row["epsilon"] for row in of_result] == [pytest.approx(rows["generous"])] * len(of_result) != []
    assert said["help of account"].code == 2 and "generous" in said["help of account"].err


def test_a_launcher_is_one_function_and_one_line(said: dict[str, Said]) -> None:
    assert "launched backwards" in said["sweep"].out
    assert "backwards" in said["help of sweep"].out


def test_a_data_set_is_one_card(said: dict[str, Said]) -> None:
    assert "weekdays" in said["data"].out


def test_a_method_is_one_file_and_one_section_in_the_union(said: dict[str, Said], place: Path) -> None:
    """It trains with its plan and its ledger, goes by steps in packs, and is named in the schema and in errors."""
    schema = json.loads(said["schema"].out)
    assert schema["$defs"]["HalvedMethod"]["properties"]["kind"]["const"] == "halved-dp-sgd"
    assert "halved-dp-sgd" in said["wrong"].err
    assert len(list(place.glob("swept/new-*/result.json"))) == 2


def test_an_optimizer_is_one_section_and_its_class(said: dict[str, Said]) -> None:
    assert "stepped by signs" in said["train with an optimizer and a layer"].out
    assert "SignSettings" in json.loads(said["schema"].out)["$defs"]


def test_a_layer_rule_is_one_file_and_its_name(said: dict[str, Said]) -> None:
    assert "ruled by a new rule" in said["train with an optimizer and a layer"].out


def test_a_command_is_one_file_and_one_line(said: dict[str, Said]) -> None:
    assert said["greet"].out == "good morning\n"


def test_a_table_option_is_one_field_and_the_line_that_reads_it(said: dict[str, Said], place: Path) -> None:
    (result,) = place.glob("quoted/*/result.json")
    assert "n,o" in json.loads(result.read_text())["privacy"]["declarations"][0]


def test_a_file_of_a_result_is_one_entry(said: dict[str, Said], place: Path) -> None:
    """It is written with every result, hashed, and its lines are counted."""
    for name in ("trained", "quoted"):
        (result,) = place.glob(f"{name}/*/result.json")
        content = (result.parent / "name.txt").read_bytes()
        told = json.loads(result.read_text())["files"]["name.txt"]
        assert told == {"sha256": hashlib.sha256(content).hexdigest(), "lines": 1}
        assert content == f"{json.loads(result.read_text())['name']}\n".encode()
