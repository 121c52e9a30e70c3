"""`dpsgd train` as a user meets it: what is printed where, what every mistake says, and what a kill leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from tests.conftest import GRADIENT, OWN, WriteRecipe

ROOT = Path(__file__).resolve().parents[2]
POISSON = GRADIENT | {"batching": "poisson"}


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, args)])


def test_results_go_to_stdout_and_files_and_nothing_to_stderr(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    recipe = write_recipe()
    result = run(recipe, "--out", tmp_path / "out", "--repeats", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    (directory,) = (tmp_path / "out").iterdir()
    assert result.stdout.startswith("tiny: 3 trials, 3 epochs\n")
    for part in (
        "test_accuracy",
        "epsilon                   at most 4.0000 at delta 0.001",
        "add-remove (poisson",
        f"results in {directory}",
    ):
        assert part in result.stdout
    assert directory.name.startswith("tiny-")


@pytest.mark.parametrize(
    "setting",
    ["method.learning_rate=1e30", "privacy.clipping={kind: flat, norm: 1000}", "privacy.budget.epsilon=0.001"],
)
def test_a_model_far_worse_than_a_constant_is_a_divergence(tmp_path: Path, setting: str) -> None:
    """All weights are finite, and the log loss is ten times that of a constant."""
    result = run("quickstart", setting, "epochs=5", "repeats=1", "--fail-on-divergence", "--out", tmp_path)
    assert result.exit_code == 1
    assert "diverged (trial 0), and --fail-on-divergence was given" in result.stderr
    honest = run(
        "quickstart", "privacy.budget.epsilon=0.3", "epochs=5", "repeats=1", "--fail-on-divergence", "--out", tmp_path
    )
    assert honest.exit_code == 0, honest.stderr


def test_a_divergence_fails_where_that_is_asked_for_once_the_result_is_there(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    method = {"kind": "sgd", "batching": "full", "learning_rate": 1e38, "weight_decay": 1}
    recipe, out = write_recipe(method=method, privacy=None), tmp_path / "out"
    assert run(recipe, "--out", out).exit_code == 0
    for arguments in (("--out", out), ("--out", tmp_path / "new")):
        failed = run(recipe, *arguments, "--fail-on-divergence")
        assert failed.exit_code == 1
        assert "diverged (trial 0, 1), and --fail-on-divergence was given" in failed.stderr.splitlines()[-1]
        assert "results in" in failed.stdout
    assert run(write_recipe(), "--out", out, "--fail-on-divergence").exit_code == 0


def test_a_second_time_shows_what_is_there(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    recipe = write_recipe(data={"path": "tiny.npz", "bounds": [0, 1]})
    first = run(recipe, "--out", tmp_path / "out")
    warning = "warning: the class labels were read from the data and are declared public"
    assert first.stderr.count(warning) == 1
    for again in (run(recipe, "--out", tmp_path / "out"), run(recipe, "--out", tmp_path / "out", "--resume")):
        assert (again.exit_code, again.stdout) == (0, first.stdout)
        assert "This recipe has been trained already; remove the directory to train it again." in again.stderr
        assert again.stderr.count(warning) == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    result = run(write_recipe(), "--dry-run", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.startswith("tiny: 3 epochs of 4 steps\n")
    assert "noise multiplier by epoch\n    0-2" in result.stdout
    assert not (tmp_path / "out").exists()
    plain = run(write_recipe(method=POISSON | {"kind": "sgd"}, privacy=None), "--dry-run")
    assert (plain.exit_code, plain.stdout) == (0, "tiny: 3 epochs without privacy; there is nothing to price\n")


def missing(tmp_path: Path) -> None:
    (tmp_path / "tiny.npz").unlink()


def damaged(tmp_path: Path) -> None:
    (tmp_path / "tiny.npz").write_text("x")


def not_a_number(tmp_path: Path) -> None:
    arrays = dict(np.load(tmp_path / "tiny.npz"))
    arrays["x"][3, 1] = np.nan
    np.savez(tmp_path / "tiny.npz", **arrays)


MODELS = """
import torch
from torch import nn

def normalised(shape, outputs):
    return nn.Sequential(nn.Linear(shape[0], 5), nn.BatchNorm1d(5), nn.Linear(5, outputs))

def mixing(shape, outputs):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(shape[0], outputs)
        def forward(self, x):
            return self.inner(x - x.mean(dim=0, keepdim=True))
    return Mixing()

def ghost(shape, outputs):
    class Ghost(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(shape[0], 6), nn.Linear(6, outputs)
        def forward(self, x):
            y = self.first(x)
            whole = y[: len(y) // 8 * 8].view(-1, 8, 6)
            return self.last(torch.cat([(whole - whole.mean(1, keepdim=True)).view(-1, 6), y[whole.shape[0] * 8 :]]))
    return Ghost()

def wide(shape, outputs):
    return nn.Linear(shape[0], outputs + 1)

def narrow(shape, outputs):
    return nn.Linear(shape[0] + 1, outputs)

def frozen(shape, outputs):
    return nn.Flatten()

def text(shape, outputs):
    return "a model"

def broken(shape, outputs):
    return nn.Linear(shape[0], outputs) / 0
"""


def own_model(factory: str, file: str = "models.py") -> dict[str, Any]:
    return {"model": {"kind": "python", "file": file, "factory": factory}}


def budget(**settings: Any) -> dict[str, Any]:
    return {"privacy": {"budget": settings, "accountant": "rdp"}}


UNIFORM = {"schedule": {"kind": "uniform", "initial": 2}, "delta": 1e-3}
PCA = [{"scale": {}}, {"pca": {"components": 2, "noise_multiplier": 1}}]
NOTHING: dict[str, Any] = {}

# What is wrong, in the recipe or (a function of the folder) beside it; the exit code; what the message must say.
MISTAKES: dict[str, tuple[dict[str, Any] | Callable[[Path], None], list[str], int, str]] = {
    "wrong type": ({"epochs": "many"}, [], 2, "epochs: must be"),
    "unknown key": ({"epoch": 3}, [], 2, "epoch: unknown key; did you mean epochs?"),
    "unknown override": (NOTHING, ["method.batchsize=3"], 2, "override method.batchsize=3: method.batchsize: unknown"),
    "no repeats": (NOTHING, ["--repeats=0"], 2, "--repeats"),
    "missing data": (missing, [], 2, "no such file: "),
    "damaged data": (damaged, [], 2, "tiny.npz cannot be read as npz arrays"),
    "NaN": (not_a_number, [], 2, "x: NaN or infinite values in 1 row, the first is row 4"),
    "labels that are no classes": ({"data": OWN | {"classes": [0, 1]}}, [], 2, "tiny.npz: "),
    "unknown card": ({"data": {"name": "mnits"}}, [], 2, "tiny.yaml:2: data.name: unknown data set 'mnits'"),
    "batch larger than the data": (NOTHING, ["method.batch_size=49"], 2, "batch_size is 49, more than the 48 training"),
    "the same without privacy": (
        {"method": POISSON | {"kind": "sgd", "batch_size": 50}, "privacy": None},
        [],
        2,
        "method.batch_size is 50, more than the 48 training records",
    ),
    "budget below one epoch": (
        {"privacy": {"budget": {"epsilon": 0.001, "delta": 1e-9}, "schedule": UNIFORM["schedule"]}},
        ["epochs=until-budget"],
        2,
        "not one epoch fits the budget (epsilon 0.001 at delta 1e-09)",
    ),
    "budget below the epochs": (
        {"privacy": {"budget": {"epsilon": 2, "delta": 1e-3}, "schedule": UNIFORM["schedule"], "accountant": "rdp"}},
        ["epochs=500"],
        2,
        "500 epochs of this schedule would pass the budget (epsilon 2 at delta 0.001);",
    ),
    "budget below the preprocessing": (
        {"data": OWN | {"preprocess": PCA}} | budget(epsilon=0.5, delta=1e-3),
        [],
        2,
        "private preprocessing alone spends the budget",
    ),
    "no statement": (
        {"method": GRADIENT | {"batching": "shuffle"}},
        ["privacy.adjacency=add-remove"],
        2,
        "shuffled batches under add-remove adjacency",
    ),
    "rho for sampled batches": ({"privacy": {"budget": {"rho": 1}, "delta": 1e-3}}, [], 2, "a budget in rho does not"),
    "no delta": ({"privacy": {"schedule": {"kind": "uniform", "initial": 2}}}, [], 2, "no delta: give privacy.delta"),
    "cnn on a table": ({"model": {"kind": "cnn"}}, [], 2, "model cnn needs images"),
    "batch normalisation": (own_model("normalised"), [], 2, "BatchNorm1d mixes the examples of a batch"),
    "examples mixed by hand": (own_model("mixing"), [], 2, "the model mixes examples"),
    "groups of eight mixed": (own_model("ghost"), [], 2, "the model mixes examples"),
    "the same, not trained": (own_model("ghost"), ["--dry-run"], 2, "the model mixes examples"),
    "too many outputs": (own_model("wide"), [], 2, "outputs"),
    "another input": (own_model("narrow"), [], 2, "(4,)"),
    "nothing to train": (own_model("frozen"), [], 2, "the model has no trainable parameters"),
    "no module": (own_model("text"), [], 2, "returned str, not a torch.nn.Module"),
    "error in a model's file": (own_model("broken"), [], 1, "models.py:41: TypeError: "),
    "the same, planned": (own_model("broken"), ["--dry-run", "privacy.clipping.kind=per-layer"], 1, "models.py:41: "),
    "no such function": (own_model("mixin"), [], 2, "has no attribute 'mixin'; did you mean mixing?"),
    "no such Python file": (own_model("build", "modells.py"), [], 2, "modells.py: no such Python file"),
    "no such device": (NOTHING, ["runtime.device=cuda:99"], 2, "runtime.device 'cuda:99' is not usable here"),
    "out is a file": (NOTHING, ["--out", "{folder}/tiny.npz"], 2, "--out"),
    "out below a file": (NOTHING, ["--out", "{folder}/tiny.npz/out"], 1, "results cannot be written here (Not a dir"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_one_message_with_its_exit_code(
    write_recipe: WriteRecipe, tmp_path: Path, mistake: str
) -> None:
    wrong, arguments, code, says = MISTAKES[mistake]
    (tmp_path / "models.py").write_text(MODELS)
    recipe = write_recipe(**({} if callable(wrong) else wrong))
    if callable(wrong):
        wrong(tmp_path)
    before = set(tmp_path.rglob("*"))
    result = run(recipe, *(["--out", tmp_path / "out"] + [text.format(folder=tmp_path) for text in arguments]))
    assert result.exit_code == code, result.output
    assert says in result.stderr
    assert sum(line.lower().startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output and isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    left = {path for path in set(tmp_path.rglob("*")) - before if "__pycache__" not in path.parts}
    assert left <= {tmp_path / "out"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "tiny.yaml:{line}: privacy.schedule.initial: auto is solved for; give privacy.budget\n"),
        (
            ["privacy.schedule.initial=auto", "epochs=until-budget"],
            "override privacy.schedule.initial=auto: privacy.schedule.initial: auto is solved for; give privacy.budget"
            " and epochs as a number, not until-budget\n",
        ),
    ],
)
def test_what_a_free_number_needs_is_said_where_it_stands(
    write_recipe: WriteRecipe, arguments: list[str], says: str
) -> None:
    recipe = write_recipe(privacy={"schedule": {"kind": "uniform", "initial": "auto"}, "delta": 1e-3})
    line = 1 + [text.strip() for text in recipe.read_text().splitlines()].index("initial: auto")
    result = run(recipe, "--dry-run", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(says.format(line=line))


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_statement_that_says_little_is_a_warning(write_recipe: WriteRecipe, tmp_path: Path, how: list[str]) -> None:
    recipe = write_recipe(privacy={"schedule": {"kind": "uniform", "initial": 0.05}, "delta": 0.05}, epochs=3)
    result = run(recipe, "--out", tmp_path / "out", *how)
    assert result.exit_code == 0
    assert "warning: delta 0.05 is not below 1 / 48, the number of training records" in result.stderr
    assert re.search(r"warning: epsilon \d+\.\d{4} is above 100: it bounds next to nothing", result.stderr)
    usual = run(recipe, "--dry-run", "privacy.schedule.initial=2", "privacy.delta=0.001")
    assert (usual.exit_code, usual.stderr) == (0, "")


OF_MODELS = (
    "cnn on a table", "batch normalisation", "examples mixed by hand", "too many outputs", "another input",
    "nothing to train", "no module", "error in a model's file", "no such function", "no such Python file",
)  # fmt: skip


@pytest.mark.parametrize("mistake", OF_MODELS)
def test_a_dry_run_refuses_the_models_that_training_refuses(
    write_recipe: WriteRecipe, tmp_path: Path, mistake: str
) -> None:
    wrong, arguments, code, says = MISTAKES[mistake]
    (tmp_path / "models.py").write_text(MODELS)
    assert not callable(wrong)
    result = run(write_recipe(**wrong), "--dry-run", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr


def test_a_dry_run_looks_for_the_method_of_a_user(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    own = {"method": POISSON | {"kind": "python", "file": "dying.py", "factory": "Dying"}}
    missing = run(write_recipe(**own), "--dry-run")
    assert missing.exit_code == 2 and "dying.py: no such Python file" in missing.stderr
    (tmp_path / "dying.py").write_text(METHOD)
    assert run(write_recipe(**own), "--dry-run").exit_code == 0
    wrong = run(write_recipe(**own), "--dry-run", "method.factory=os")
    assert wrong.exit_code == 2 and "dying.py: os is module, not a function" in wrong.stderr


def test_a_device_of_no_such_name_is_refused_even_where_there_is_a_result(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    recipe = write_recipe()
    assert run(recipe, "--out", tmp_path / "out").exit_code == 0
    for arguments in ([], ["--dry-run"]):
        result = run(recipe, "--out", tmp_path / "out", *arguments, "runtime.device=gpu")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "must be auto, cpu, cuda or cuda:N, got 'gpu'; did you mean cuda?" in result.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file, and no shipped recipe of that name"),
        ("", "empty; see `dpsgd recipe show quickstart`"),
        ("name: [a", "tiny.yaml:1: "),
        ("- a list\n", "tiny.yaml:1: must be a section with keys name, "),
    ],
)
def test_a_recipe_that_cannot_be_read(tmp_path: Path, text: str | None, says: str) -> None:
    recipe = tmp_path / "tiny.yaml"
    if text is not None:
        recipe.write_text(text)
    result = run(recipe, "--out", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and says in result.stderr
    assert not (tmp_path / "out").exists()


METHOD = """
import os
from dpsgd_cli.methods.dp_sgd.run import DpSgd

class Dying(DpSgd):
    def run_epoch(self, epoch):
        if epoch == 3 and "SIGNAL" in os.environ:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return super().run_epoch(epoch)
"""
DYING = {
    "method": POISSON | {"kind": "python", "file": "dying.py", "factory": "Dying", "optimizer": {"kind": "adam"}},
    "data": OWN | {"preprocess": [{"scale": {}}, {"pca": {"components": 3, "noise_multiplier": 8}}]},
    "runtime": {"device": "cpu", "threads": 1, "checkpoint_seconds": 0},
    "epochs": 6,
    "save_model": True,
}


def train_in_a_process(recipe: Path, out: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the real command line in a process of its own, which can be killed."""
    command = [sys.executable, "-m", "dpsgd_cli", "train", str(recipe), "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_resumes_to_what_it_would_have_been(
    write_recipe: WriteRecipe, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "dying.py").write_text(METHOD)
    recipe = write_recipe(**DYING)
    assert run(recipe, "--out", tmp_path / "whole").exit_code == 0
    (whole,) = (tmp_path / "whole").iterdir()

    killed = train_in_a_process(recipe, tmp_path / "out", env={**os.environ, "SIGNAL": str(int(number))})
    assert killed.stdout == ""
    if number == signal.SIGKILL:
        assert killed.returncode == -signal.SIGKILL
    else:
        assert killed.returncode == 128 + number
        kept = "3 of 6 epochs are kept: the same command with --resume continues there"
        assert killed.stderr == f"error: interrupted; {kept}\n"
    assert not (tmp_path / "out" / whole.name).exists()

    resumed = run(recipe, "--out", tmp_path / "out", "--resume")
    assert resumed.exit_code == 0
    assert resumed.stderr == "Continuing after epoch 3 of 6.\n"
    (continued,) = (tmp_path / "out").iterdir()
    for name in ("ledger.jsonl", "trials.csv", "history.csv", "model.safetensors", "recipe.yaml"):
        assert (continued / name).read_bytes() == (whole / name).read_bytes()
    one, other = (json.loads((at / "result.json").read_text()) for at in (continued, whole))
    assert one["privacy"] == other["privacy"]
    assert one["metrics"] == other["metrics"]


def test_files_that_may_not_grow_are_one_message(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """A real limit of the system on the size of files, which the first checkpoint passes."""
    resource = pytest.importorskip("resource", reason="needs limits on processes")
    recipe = write_recipe(model={"kind": "mlp", "hidden": [3000]}, runtime=DYING["runtime"])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    done = train_in_a_process(
        recipe, tmp_path / "out", preexec_fn=limit, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert ".checkpoint: File too large; free some space; no checkpoint could be written" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_training_does_not_load_a_compiler_that_nobody_asked_for(write_recipe: WriteRecipe) -> None:
    """It takes a second of every command."""
    code = (
        "import sys; from dpsgd_cli.main import main; sys.argv[0] = 'dpsgd'\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)))"
    )
    recipe = write_recipe()
    command = [sys.executable, "-c", code, "train", str(recipe), "--out", str(recipe.parent / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("['torch']\n")


def test_a_small_training_imports_only_what_it_needs(tmp_path: Path) -> None:
    """matplotlib takes a processor second."""
    unused = ("matplotlib", "scipy.signal")
    code = (
        "import sys\nfrom dpsgd_cli.main import main\n"
        f"try: main(['train', 'quickstart', 'epochs=1', '--out', {str(tmp_path)!r}])\n"
        f"finally: print('loaded:', [name for name in {unused} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"
    assert next(tmp_path.glob("*/report.html")).read_text().count("<svg") == 2
