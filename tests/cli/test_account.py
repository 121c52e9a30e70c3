"""`dpsgd account`: prices, solutions, curves, the gate, and the errors of its command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.ledger import Ledger, to_lines
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.results import store
from dpsgd_cli.results.summary import result_text
from tests.cli.accounting import SCHEDULES, recipe, rows, run, table
from tests.conftest import Train, WriteRecipe, toy_result, write_result

ABADI = ["--noise-multiplier", "4", "--sampling-rate", "0.01", "--steps", "10000"]
SHUFFLED = ["--batching", "shuffle", "--noise-multiplier", "6", "--epochs", "400"]


def test_every_usual_accountant_answers_or_says_why_not() -> None:
    found = rows(*ABADI)
    assert set(found) == set(accountants.USUAL)
    assert found["moments"]["epsilon"] == pytest.approx(1.2586, abs=5e-5)
    assert found["moments"]["adjacency"] == "add-remove"
    assert found["moments"]["batching"] == "poisson"
    assert found["moments"]["delta"] == 1e-5
    assert found["moments"]["bound"] == "upper"
    assert found["zcdp-rs"]["bound"] == "estimate"
    assert found["gaussian"]["epsilon"] is None
    assert "not Gaussian" in found["gaussian"]["note"]


def test_the_table_is_sorted_and_ends_with_the_refusals() -> None:
    result = run(*ABADI)
    assert result.exit_code == 0
    priced, refused = result.stdout.split("no statement:")
    *names, said = [line.split()[0] for line in priced.splitlines()[2:] if line]
    assert said == "each" and names == ["pld", "rdp", "moments", "strong-composition", "basic-composition", "zcdp-rs"]
    assert "zcdp: poisson batches" in refused
    assert "0.9469" in priced


def test_shuffled_steps_are_counted_as_whole_epochs() -> None:
    flags = ["--batching", "shuffle", "--noise-multiplier", "6", "--sampling-rate", "0.01", "--accountant", "zcdp"]
    by_steps = rows(*flags, "--steps", "201")["zcdp"]["epsilon"]
    assert by_steps == rows(*flags, "--epochs", "3")["zcdp"]["epsilon"]


def test_the_lower_bound_of_shuffling_is_told() -> None:
    result = run("--batching", "shuffle", "--noise-multiplier", "0.5", "--sampling-rate", "1e-4", "--epochs", "1",
                 "--delta", "1e-6")  # fmt: skip
    assert "at least epsilon 10.99" in result.stdout


def test_a_rate_may_be_a_batch_size_over_a_number_of_records() -> None:
    rest = ["--noise-multiplier", "4", "--steps", "10", "--format", "json"]
    assert run("--sampling-rate", "600/60000", *rest).output == run("--sampling-rate", "0.01", *rest).output


def test_delta_at_an_epsilon() -> None:
    epsilon = rows(*ABADI, "--accountant", "rdp")["rdp"]["epsilon"]
    found = rows(*ABADI, "--accountant", "rdp", "--at-epsilon", repr(epsilon))
    assert found["rdp"]["delta"] == pytest.approx(1e-5, rel=1e-6)


def test_csv_has_a_line_per_accountant() -> None:
    found = table(*ABADI, "--format", "csv", "--accountant", "rdp", "--accountant", "gaussian")
    assert [row["accountant"] for row in found] == ["rdp", "gaussian"]
    assert float(found[0]["epsilon"]) == pytest.approx(1.0355, abs=5e-5)
    assert found[1]["epsilon"] == ""


def test_noise_for_a_rho_is_exact() -> None:
    found = rows("--batching", "shuffle", "--epochs", "100", "--target-rho", "0.78125")
    assert found["zcdp"]["noise-multiplier"] == 8
    assert found["gaussian"]["epsilon"] == pytest.approx(5.68, abs=0.005)


def test_table_two(tmp_path: Path) -> None:
    path = recipe(tmp_path, SCHEDULES["exponential"])
    assert "shuffled: 71 epochs of 100 steps" in run(path, "--accountant", "zcdp").stdout
    assert rows(path, "--solve", "epochs", "--accountant", "zcdp")["zcdp"]["epochs"] == 71
    told = run(path, "--solve", "rate", "--epochs", "50")
    assert (told.exit_code, "one of: initial, decay, epochs" in told.stderr) == (2, True)


def test_epsilon_targets_go_by_each_accountant(tmp_path: Path) -> None:
    path = recipe(tmp_path, SCHEDULES["exponential"])
    names = ["--accountant", "zcdp", "--accountant", "gaussian"]
    found = rows(path, "--solve", "decay", "--epochs", "60", "--target-epsilon", "5", *names)
    assert found["gaussian"]["decay"] > found["zcdp"]["decay"]
    assert found["gaussian"]["epsilon"] <= 5
    assert found["gaussian"]["epsilon"] == pytest.approx(5, abs=1e-5)


def test_curve_is_epsilon_epoch_by_epoch(tmp_path: Path) -> None:
    found = table(recipe(tmp_path, SCHEDULES["exponential"]), "--curve", "--accountant", "zcdp")
    assert len(found) == 71
    assert [row["epochs"] for row in found[:3]] == ["1", "2", "3"]
    assert float(found[0]["noise multiplier"]) == 10
    assert float(found[0]["rho"]) == pytest.approx(1 / 200)
    last = rows(recipe(tmp_path, SCHEDULES["exponential"]), "--accountant", "zcdp")["zcdp"]
    assert float(found[-1]["zcdp"]) == pytest.approx(last["epsilon"], rel=1e-9)


def test_figures_two_and_three_in_one_command_each(tmp_path: Path) -> None:
    names = [f"--accountant={name}" for name in ("zcdp@shuffle", "zcdp-rs@poisson", "moments@poisson")]
    both = ["--batching", "shuffle", "--batching", "poisson", *names]
    picture = tmp_path / "figure2.png"
    curve = table("--noise-multiplier", "6", "--sampling-rate", "0.01", "--epochs", "20", *both, "--curve",
                  "--plot", str(picture))  # fmt: skip
    assert list(curve[0]) == ["epochs", "shuffle zcdp", "poisson zcdp-rs", "poisson moments"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    rates = table("--noise-multiplier", "6", "--epochs", "200", *both, "--over", "sampling-rate=0.005:0.015:0.005")
    assert [float(row["shuffle zcdp"]) for row in rates] == pytest.approx([14.0880] * 3, abs=5e-5)
    assert float(rates[1]["poisson zcdp-rs"]) == pytest.approx(1.6551, abs=5e-5)
    assert rates[2]["poisson zcdp-rs"] == ""  # outside the estimate's region
    noises = table("--sampling-rate", "0.01", "--epochs", "200", *both, "--over", "noise-multiplier=5:7:1")
    assert len(noises) == 3


EVERY = ["basic-composition", "strong-composition", "zcdp-rs (estimate)", "moments", "rdp", "pld"]


@pytest.mark.parametrize(
    ("asked", "drawn"),
    [
        (["--accountant", "rdp", "--accountant", "pld", "--curve"], ["rdp", "pld"]),
        (["--curve"], EVERY),
        (["--over", "noise-multiplier=4:6:1"], EVERY),
        (["--over", "order=2:4:1"], ["sampled", "unsampled", "conjectured bound"]),
    ],
)
def test_a_picture_shows_what_was_asked_and_its_legend_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], drawn: list[str]
) -> None:
    """Curves of accountants; never rho or noise."""
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    save = Figure.savefig

    def watched(figure: Figure, *args: Any, **given: Any) -> None:
        seen.append(figure)
        save(figure, *args, **given)

    monkeypatch.setattr(Figure, "savefig", watched)
    numbers = ["--noise-multiplier", "4", "--sampling-rate", "0.01"]
    length = [] if "order=2:4:1" in asked else ["--epochs", "3"]
    assert run(*numbers, *length, *asked, "--plot", str(tmp_path / "x.png")).exit_code == 0
    (figure,) = seen
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.get_lines()] == drawn
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == drawn
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_figure_sixteen_shows_the_conjectured_bound() -> None:
    found = table("--noise-multiplier", "1", "--sampling-rate", "0.06", "--over", "order=1.5:3.5:1")
    assert [row["order"] for row in found] == ["1.5", "2.5", "3.5"]
    assert float(found[2]["sampled"]) > float(found[2]["conjectured bound"])
    assert float(found[2]["unsampled"]) == pytest.approx(1.75)


def test_several_recipes_in_one_figure(tmp_path: Path) -> None:
    first = recipe(tmp_path, SCHEDULES["uniform"])
    second = str(Path(first).rename(tmp_path / "first.yaml"))
    other = recipe(tmp_path, SCHEDULES["time"])
    Path(other).write_text(Path(other).read_text().replace("name: shuffled", "name: decaying"))
    picture = tmp_path / "figure13.pdf"
    found = table(second, other, "--accountant", "zcdp", "--curve", "--plot", str(picture))
    assert list(found[0])[1:] == ["shuffled rho", "shuffled zcdp", "decaying rho", "decaying zcdp"]
    assert found[-1]["decaying rho"] == ""
    assert picture.stat().st_size > 1000


def test_a_gate_fails_when_no_bound_is_below_it() -> None:
    assert run(*ABADI, "--max-epsilon", "0.95").exit_code == 0
    result = run(*ABADI, "--accountant", "rdp", "--max-epsilon", "0.95")
    assert result.exit_code == 1
    assert "epsilon 1.03549 (rdp) exceeds --max-epsilon 0.95" in result.stderr
    assert "1.0355" in result.stdout
    estimate = run(*ABADI, "--accountant", "zcdp-rs", "--max-epsilon", "100")
    assert estimate.exit_code == 1
    assert "no accountant asked proves a bound" in estimate.stderr


# which records are left out
DIGITS = "data: {name: digits}\nmethod: {batching: poisson}\n"


def ledger_lines(epochs: list[int], seed: int = 0) -> list[str]:
    """Trials of that many epochs each, from this seed on."""
    lines: list[str] = []
    for trial, count in enumerate(epochs):
        made = Ledger()
        made.spend(Release(GaussianSum(16.0, "zero-out")), phase="before")
        for epoch in range(count):
            made.spend(Release(GaussianSum(6.0, "zero-out", "shuffle")), epoch=epoch)
        lines += to_lines(made.entries, trial, seed + trial)
    return lines


def ledger(path: Path, epochs: list[int], seed: int = 0) -> None:
    path.write_text("\n".join(ledger_lines(epochs, seed)) + "\n")


def test_a_ledger_is_priced_by_its_dearest_trial_or_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger(path, [10, 30])
    single = rows(str(path), "--accountant", "zcdp")["zcdp"]
    assert single["rho"] == pytest.approx(30 / 72 + 1 / 512)
    assert single["batching"] == "shuffle"
    result = tmp_path / "result"
    write_result(result, toy_result(ledger_lines([10, 30])), DIGITS)
    whole = rows(str(result), "--accountant", "zcdp", "--trials", "all")["zcdp"]
    assert whole["rho"] == pytest.approx(40 / 72 + 2 / 512)
    both = table(str(result), "--accountant", "zcdp", "--trials", "all", "--curve")
    assert [float(both[epoch]["rho"]) for epoch in (9, 29)] == pytest.approx([20 / 72 + 2 / 512, 40 / 72 + 2 / 512])
    curve = table(str(path), "--accountant", "gaussian", "--curve")
    assert len(curve) == 30


def test_a_result_directory_brings_its_own_delta(tmp_path: Path) -> None:
    for name, epochs in (("one", [10]), ("two", [20, 5])):
        folder = tmp_path / "sweep" / name
        lines = ledger_lines(epochs, 10 * len(epochs))
        write_result(folder, toy_result(lines, 1e-6, len(epochs)), DIGITS)
    found = rows(str(tmp_path / "sweep" / "one"), "--accountant", "gaussian")["gaussian"]
    assert found["delta"] == 1e-6
    sweep = rows(str(tmp_path / "sweep"), "--accountant", "zcdp", "--trials", "all")["zcdp"]
    assert sweep["rho"] == pytest.approx(35 / 72 + 3 / 512)


def test_trials_of_flags_and_recipes(tmp_path: Path) -> None:
    five = rows(*SHUFFLED, "--accountant", "zcdp", "--trials", "5")["zcdp"]
    assert five["rho"] == pytest.approx(2000 / 72)
    path = recipe(tmp_path, SCHEDULES["uniform"], "repeats: 3\n")
    assert rows(path, "--accountant", "zcdp", "--trials", "all")["zcdp"]["rho"] == pytest.approx(3 * 0.78125)


def test_the_best_of_some_trials_costs_less_than_all_of_them() -> None:
    one = rows(*ABADI, "--accountant", "rdp")["rdp"]["epsilon"]
    best = rows(*ABADI, "--best-of", "10")["rdp"]["epsilon"]
    everything = rows(*ABADI, "--accountant", "rdp", "--trials", "10")["rdp"]["epsilon"]
    assert one < best < everything


def test_a_damaged_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"mechanism": "gaussian"}\n')
    result = run(str(path))
    assert result.exit_code == 2
    assert f"{path}:1" in result.stderr
    empty = run(str(tmp_path / "nothing.jsonl"))
    assert empty.exit_code == 2
    assert "cannot read" in empty.stderr
    (tmp_path / "folder").mkdir()
    assert "holds no ledger.jsonl" in run(str(tmp_path / "folder")).stderr


def test_a_ledger_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger(path, [3])
    for change in (["privacy.delta=1e-6"], ["--epochs", "4"], ["--trials", "2"], ["--solve", "decay"]):
        assert run(str(path), *change).exit_code == 2


@pytest.mark.parametrize(
    ("args", "heavy", "answer"),
    [
        (
            [*ABADI, "--accountant", "moments", "--accountant", "rdp"],
            {"torch", "scipy", "pandas", "pydantic", "sklearn", "matplotlib", "dp_accounting"},
            "1.2586",
        ),
        (["quickstart"], {"torch"}, "pld"),
        (
            [f"lee2018/{name}" for name in ("privgene", "majority", "output-perturbation", "objective-perturbation")],
            {"torch"},
            "privgene",
        ),
    ],
)
def test_answers_load_no_more_than_they_need(args: list[str], heavy: set[str], answer: str) -> None:
    script = (
        f"import sys; from dpsgd_cli.main import main; sys.argv = ['dpsgd', 'account', *{args!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer in done.stdout
    assert done.stderr.strip() == "[]"


def test_what_a_free_number_needs_is_said_where_it_stands(tmp_path: Path) -> None:
    recipe = tmp_path / "free.yaml"
    recipe.write_text(
        "name: free\ndata: {name: digits}\nmodel: {kind: linear}\nmethod: {kind: dp-sgd, batch_size: 100}\n"
        "privacy:\n  schedule: {kind: uniform, initial: auto}\n  delta: 1e-5\nepochs: 3\n"
    )
    result = run(str(recipe))
    assert result.exit_code == 2
    assert f"{recipe}:6: privacy.schedule.initial: auto is solved for; give privacy.budget" in result.stderr


def test_a_gate_judges_every_source_however_it_is_called(tmp_path: Path) -> None:
    for name, epochs in (("cheap", 1), ("dear", 400)):
        (tmp_path / name).mkdir()
        ledger(tmp_path / name / "ledger.jsonl", [epochs])
    both = [str(tmp_path / name / "ledger.jsonl") for name in ("cheap", "dear")]
    assert run(both[0], "--max-epsilon", "1.5").exit_code == 0
    assert run(*both, "--max-epsilon", "1.5").exit_code == 1
    assert run(*both[::-1], "--max-epsilon", "1.5").exit_code == 1
    flags = ["--batching", "poisson", "--batching", "full", "--noise-multiplier", "9", "--sampling-rate", "0.01"]
    assert run(*flags, "--steps", "100", "--max-epsilon", "0.2").exit_code == 1
    curve = run(*both, "--accountant", "gaussian", "--curve").stdout.splitlines()[0]
    assert "ledger.jsonl #1 gaussian" in curve or "shuffle #1 gaussian" in curve
    assert "#2 gaussian" in curve


def test_what_no_price_covers_is_said_and_passes_no_gate(write_recipe: WriteRecipe, train: Train) -> None:
    path = write_recipe(data={"path": "tiny.npz", "classes": [0, 1, 2], "preprocess": [{"scale": {"by": "standard"}}]})
    directory = train(path)
    for source in (path, directory):
        told = run(str(source))
        assert "scale by standard was fitted on the training rows without noise" in told.stdout
        assert "an experiment: anybody who knows the seed can subtract the noise" in told.stdout
        gate = run(str(source), "--max-epsilon", "99")
        assert (gate.exit_code, "does not cover it" in gate.stderr) == (1, True)
    assert "NOT covered" in result_text(store.read_document(directory), directory)
