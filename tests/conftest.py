"""What every test may use: real data where it is, a small recipe to train, and Hypothesis profiles."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, settings
from torch import Tensor

from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.budget import Budget, over_budget
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.common.plugins import OWN_FILES, trusting
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.independence import check_model
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.methods.dp_sgd import price
from dpsgd_cli.results import store
from dpsgd_cli.results.result import ResultContent
from dpsgd_cli.training import build_models
from dpsgd_cli.training.plans import resolve_auto

# A shared machine may be slow: how long an example takes is never a reason to fail.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell makes what it starts in the background deaf to Ctrl-C, and so every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = {
    "clipping/test_compiling.py",
    "contracts/test_ways.py",
    "engine/test_independence.py",
    "engine/test_processes.py",
    "sweep/test_kills.py",
    "test_any_table.py",
    "test_attacks.py",
    "test_docs.py",
    "test_fuzz.py",
    "contracts/test_neighbours.py",
    "test_own_models.py",
    "test_pages.py",
    "test_recipes_run.py",
    "test_sklearn.py",
    "test_trust.py",
    "training/test_explain.py",
    "training/test_loop.py",
    "training/test_start.py",
    "users/test_users.py",
}
"""Files whose tests took more than half of the time of all (`make test-all ARGS=--durations=100`)."""


LONG = (
    "account/test_mixed_ledgers.py::test_no_accountant_states_less_than_a_ledger_costs[26]",
    "accounting/accountants/test_pld.py::test_composition_agrees_with_dp_accounting[0.01-0.5-1000-1e-08]",
    "accounting/test_noise_levels.py::test_a_curve_of_many_levels_ends_in_their_price",
    "accounting/test_noise_levels.py::test_many_levels_cost_no_less_than_their_exact_price_and_little_more[1e-10-",
    "accounting/test_noise_levels.py::test_thousands_of_levels_take_seconds",
    "accounting/test_planners.py::test_dp_sgd_has_the_noise_of_the_accountant_it_names[rdp-markov]",
    "accounting/test_renyi.py::test_poisson_divergence_is_its_integral[1.0-32-",
    "accounting/test_renyi.py::test_poisson_divergence_is_its_integral[4.0-63.5-",
    "accounting/test_renyi.py::test_replaced_records_have_the_divergences_of_their_worst_pairs[0.01-0.3-1.5]",
    "accounting/test_renyi.py::test_replaced_records_have_the_divergences_of_their_worst_pairs[0.02-0.3-12.0]",
    "accounting/test_renyi.py::test_replaced_records_have_the_divergences_of_their_worst_pairs[0.02-0.7-3.0]",
    "accounting/test_renyi.py::test_replaced_records_have_the_divergences_of_their_worst_pairs[0.1-1.0-2.0]",
    "accounting/test_tradeoff.py::test_mu_of_sampled_training_is_between_dp_accountings_two_profiles[0.05-0.7-20]",
    "audit/test_laws.py::test_two_means_are_told_apart_as_well_as_their_law_allows",
    "audit/test_training.py::test_a_true_claim_is_seldom_refuted",
    "audit/test_training.py::test_canaries_come_near_the_claim[poisson, convex]",
    "batching/test_sampling.py::test_a_cyclic_batch_takes_each_record_of_its_group_at_the_stated_rate[secure]",
    "cli/test_account.py::test_answers_load_no_more_than_they_need[args2",
    "cli/test_account_solving.py::test_the_largest_batch_of_a_budget_is_what_dp_accounting_would_take",
    "cli/test_odd_inputs.py::test_a_pipe_is_refused_where_it_would_be_waited_for",
    "cli/test_train.py::test_a_killed_run_resumes_to_what_it_would_have_been[2]",
    "cli/test_train.py::test_a_killed_run_resumes_to_what_it_would_have_been[9]",
    "cli/test_train.py::test_a_small_training_imports_only_what_it_needs",
    "clipping/test_compiling.py::test_a_recipe_trains_the_same_weights",
    "clipping/test_compiling.py::test_examples_that_are_not_finite_add_nothing[inductor",
    "clipping/test_compiling.py::test_noise_is_new_at_every_step",
    "clipping/test_compiling.py::test_norms_and_sums_are_of_the_same_numbers",
    "clipping/test_compiling.py::test_one_program_serves_pieces_of_batches_of_any_width[2]",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[cnn-",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[fallback-none]",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[fallback-per-layer]",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[mlp-none]",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[mlp-per-layer]",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[pools-",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[residual-",
    "clipping/test_compiling.py::test_programs_follow_new_batches_and_new_weights[sequence-",
    "clipping/test_compiling.py::test_rounded_programs_follow_new_weights[cnn]",
    "clipping/test_compiling.py::test_rounded_programs_follow_new_weights[mlp]",
    "clipping/test_compiling.py::test_rounded_programs_follow_new_weights[pools",
    "clipping/test_compiling.py::test_rounded_programs_follow_new_weights[residual",
    "clipping/test_compiling.py::test_rounded_programs_follow_new_weights[sequence",
    "clipping/test_compiling.py::test_what_is_added_keeps_the_bound_where_terms_cancel",
    "contracts/test_neighbours.py::test_nor_does_it_move_what_steps_add_up_by_more_than_the_ledger_says[raw ",
    "contracts/test_neighbours.py::test_one_record_changed_shows_in_nothing_public[flipped-",
    "contracts/test_neighbours.py::test_one_record_changed_shows_in_nothing_public[nulled-",
    "data/test_card_readers.py::test_real_files[kddcup99]",
    "data/test_on_disk.py::test_memory_does_not_grow_with_the_file",
    "engine/test_elsewhere.py::test_trains_as_on_a_cpu_and_does_not_wait[cnn, cifar10]",
    "engine/test_elsewhere.py::test_trains_as_on_a_cpu_and_does_not_wait[copies]",
    "engine/test_elsewhere.py::test_trains_as_on_a_cpu_and_does_not_wait[one by one]",
    "engine/test_elsewhere.py::test_trains_as_on_a_cpu_and_does_not_wait[wrn]",
    "engine/test_processes.py::",
    "evaluation/test_estimates.py::test_a_baseline_and_the_gain_over_it_are_covered_as_stated[0.5]",
    "evaluation/test_estimates.py::test_intervals_hold_the_truth_as_often_as_they_say[8.0]",
    "recipe/test_copying.py::test_a_copy_trains_to_the_same_weights[beyond/",
    "recipe/test_copying.py::test_a_copy_trains_to_the_same_weights[lee2018/",
    "recipe/test_copying.py::test_a_copy_trains_to_the_same_weights[quickstart-changes0]",
    "results/test_book.py::test_of_processes_at_once_as_many_get_in_as_fit",
    "sweep/test_planning.py::test_packs_are_full_but_not_overfull_and_of_like_length",
    "sweep/test_shards.py::test_a_shard_with_a_slow_disk_leaves_no_statement_of_fewer_cells",
    "test_any_table.py::test_from_the_file_to_predictions[churn]",
    "test_any_table.py::test_from_the_file_to_predictions[currency]",
    "test_any_table.py::test_from_the_file_to_predictions[genes]",
    "test_attacks.py::test_the_first_record_removed_is_not_found_by_a_linear_score[by content-records]",
    "test_attacks.py::test_the_first_record_removed_is_not_found_by_a_linear_score[by content-users]",
    "test_attacks.py::test_the_first_record_removed_is_not_found_by_a_linear_score[control: by place-",
    "test_convex_runs.py::test_budgets_of_one_method_train_as_one_pack_to_what_each_gets_alone[dp-agd]",
    "test_docs.py::test_a_page_works_as_written[docs/a-papers-method.md]",
    "test_docs.py::test_a_page_works_as_written[docs/adding.md]",
    "test_docs.py::test_a_page_works_as_written[docs/auditing.md]",
    "test_docs.py::test_a_page_works_as_written[docs/budget.md]",
    "test_docs.py::test_a_page_works_as_written[docs/checking-a-claim.md]",
    "test_docs.py::test_a_page_works_as_written[docs/choosing-epsilon.md]",
    "test_docs.py::test_a_page_works_as_written[docs/evaluation.md]",
    "test_docs.py::test_a_page_works_as_written[docs/guarantees.md]",
    "test_docs.py::test_a_page_works_as_written[docs/images.md]",
    "test_docs.py::test_a_page_works_as_written[docs/index.md]",
    "test_docs.py::test_a_page_works_as_written[docs/intervals.md]",
    "test_docs.py::test_a_page_works_as_written[docs/own-models.md]",
    "test_docs.py::test_a_page_works_as_written[docs/pitfalls.md]",
    "test_docs.py::test_a_page_works_as_written[docs/start.md]",
    "test_docs.py::test_a_page_works_as_written[docs/sweeps.md]",
    "test_docs.py::test_a_page_works_as_written[docs/users.md]",
    "test_docs.py::test_a_page_works_as_written[docs/your-own-table.md]",
    "test_fuzz.py::test_files_that_are_not_in_order_are_answered[own.yaml-content2]",
    "test_own_models.py::test_all_three_refuse_the_same_for_the_same_reason[compiled",
    "test_packaging.py::test_a_user_without_rights_trains_from_a_read_only_folder",
    "test_packaging.py::test_the_sdist_holds_what_its_tests_and_documents_need_and_builds_the_same_wheel",
    "test_pages.py::test_a_page_is_what_its_rows_say[automatic]",
    "test_pages.py::test_a_page_is_what_its_rows_say[frontier]",
    "test_pages.py::test_a_page_is_what_its_rows_say[l",
    "test_pages.py::test_a_page_is_what_its_rows_say[pate]",
    "test_pages.py::test_a_page_is_what_its_rows_say[yu2019]",
    "test_pages.py::test_ada_ssp_has_that_noise_in_its_sums[4]",
    "test_pages.py::test_the_page_of_tables_is_what_its_csv_says",
    "test_recipes_run.py::test_a_recipe_trains[beyond/mnist-allocation",
    "test_recipes_run.py::test_a_recipe_trains[de2022/",
    "test_recipes_run.py::test_a_recipe_trains[frontier/cifar10]",
    "test_recipes_run.py::test_a_recipe_trains[lectures/cifar10-last-layer]",
    "test_sklearn.py::test_a_search_over_parameters_is_refused[2]",
    "test_sklearn.py::test_the_checks_of_scikit_learn_pass[classifier-None]",
    "test_sklearn.py::test_the_checks_of_scikit_learn_pass[regressor-",
    "training/test_charging.py::test_a_training_that_is_killed_outright_stays_charged",
    "training/test_costs.py::test_a_dear_miss_is_missed_less_at_the_same_price",
    "training/test_explain.py::test_a_straight_line_has_straight_shapes_in_the_unit_of_the_target",
    "training/test_explain.py::test_the_band_is_the_spread_of_many_trainings_or_above_it",
    "training/test_finish.py::test_a_killed_run_is_priced_finished_and_used",
    "training/test_finish.py::test_pate_is_finished_once_its_student_learns",
    "training/test_inference.py::test_probabilities_are_shares_of_records_however_residuals_were_clipped[0.7",
    "training/test_inference.py::test_probabilities_are_shares_of_records_however_residuals_were_clipped[9",
    "training/test_pack.py::test_a_stopped_pack_goes_on_where_it_was",
    "training/test_pack.py::test_a_trial_ends_the_same_alone_and_in_a_pack",
    "training/test_quantiles.py::test_a_model_predicts_the_asked_quantile_of_a_long_tail",
    "training/test_quantiles.py::test_settings_by_rule_follow_the_bounds_of_a_loss",
    "users/test_users.py::test_all_rows_of_a_user_changed_show_in_nothing_public[flipped-",
)
"""Single tests that CI leaves out (`make test-all ARGS='-m long'`), because each takes seconds."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of slow files `slow`, and the long ones `long`."""
    here = Path(__file__).parent
    assert all((here / name).is_file() for name in SLOW)
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        path = item.path.relative_to(here).as_posix()
        if f"{path}::{item.nodeid.partition('::')[2]}".startswith(LONG):
            item.add_marker(pytest.mark.long)
        if path in SLOW:
            item.add_marker(pytest.mark.slow)


PLANTED = ("audit/", "discovery/", "evaluation/test_audited.py")
"""Tests that plant bugs in what a plan is made by, while they run."""
_OVER_BUDGET = over_budget
_OVER: dict[tuple[str, str, tuple[Release, ...]], float] = {}


def _priced_once(budget: Budget, accountant: Accountant, releases: Sequence[Release]) -> float:
    """Return `over_budget`, computed once in a process: solving for the noise is half of a small training."""
    key = (repr(budget), accountant.name, tuple(releases))
    if key not in _OVER:
        _OVER[key] = _OVER_BUDGET(budget, accountant, releases)
    return _OVER[key]


_CHECK_MODEL = check_model
_CHECKED: set[tuple[Any, ...]] = set()


def _checked_once(pack: Pack, input_shape: tuple[int, ...], like: Tensor) -> None:
    """Compare a built-in network of these layers with autograd, once in a process: it is a tenth of a training."""
    key = (repr(pack.template), str(pack.spans), input_shape, like.dtype, pack.values.dtype, pack.values.device)
    if not pack.trusted or key not in _CHECKED:
        _CHECK_MODEL(pack, input_shape, like)
    _CHECKED.add(key)


ABOUT_EVALUATION = ("evaluation/", "test_any_table.py", "test_docs.py")
"""Tests whose recipes are read as a user's: held-out records of an own table are private unless stated otherwise."""
_MEASURED = Data.measured


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let recipes of all other tests state `evaluation: public` where they leave it out, as trial-sized tables need."""
    usual = item.path.relative_to(Path(__file__).parent).as_posix().startswith(ABOUT_EVALUATION)
    setattr(Data, "measured", _MEASURED if usual else _stated)  # noqa: B010, which mypy does not take as an assignment
    of_bugs = item.path.relative_to(Path(__file__).parent).as_posix().startswith(PLANTED)
    setattr(price, "over_budget", _OVER_BUDGET if of_bugs else _priced_once)  # noqa: B010
    setattr(build_models, "check_model", _CHECK_MODEL if of_bugs else _checked_once)  # noqa: B010


def _stated(data: Data, folds: int | None) -> Data:
    return data if data.evaluation is None else _MEASURED(data, folds)


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the cache of the user who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_code_is_trusted(_own_cache_folder: None) -> Iterator[None]:
    """Tests run Python files that they wrote themselves, and forget them; `tests/test_trust.py` is about others'."""
    before = set(sys.modules)
    with trusting():
        yield
    for name in [name for name in sys.modules if name.startswith(OWN_FILES) and name not in before]:
        del sys.modules[name]


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """Gives the folder of a real data set by name, or skips the test where DPSGD_DATA does not hold it."""

    def folder(name: str) -> Path:
        root = os.environ.get("DPSGD_DATA")
        if not root:
            pytest.skip(f"needs the real {name} data: set DPSGD_DATA")
        found = Path(root) / name
        if not found.is_dir():
            pytest.skip(f"needs the real {name} data: not in DPSGD_DATA")
        return found

    return folder


WriteRecipe = Callable[..., Path]
Train = Callable[..., Path]
StopAt = Callable[[int, BaseException], Callable[[int, int], None]]


@pytest.fixture
def write_recipe(tmp_path: Path) -> WriteRecipe:
    """Writes `tiny.yaml` as `recipe_writer` does."""
    return recipe_writer(tmp_path)


def recipe_writer(folder: Path) -> WriteRecipe:
    """Writes `tiny.yaml`: two private trials of three epochs on 48 rows of `tiny.npz` beside it, which a linear model
    can tell apart. Keyword arguments replace whole sections; None leaves one out.
    """
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (rng.random((60, 4)) + np.eye(3, 4)[y]) / 2
    np.savez(folder / "tiny.npz", x=x[:48], y=y[:48], x_test=x[48:], y_test=y[48:])

    def write(**sections: Any) -> Path:
        content = {
            "name": "tiny",
            "data": {"path": "tiny.npz", "bounds": [0, 1], "classes": [0, 1, 2]},
            "model": {"kind": "linear"},
            "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 12, "learning_rate": 0.5},
            "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}, "accountant": "rdp"},
            "runtime": {"device": "cpu", "threads": 1, "checkpoint_seconds": 1000},
            "epochs": 3,
            "seed": 0,
            "repeats": 2,
        } | sections
        path = folder / "tiny.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    return write


@pytest.fixture
def train() -> Train:
    """Trains a recipe file with KEY=VALUE overrides; results go to `out` beside it, if no option says otherwise."""
    from dpsgd_cli.recipe.loading import load_recipe
    from dpsgd_cli.training import loop

    def run(path: Path, *overrides: str, **options: Any) -> Path:
        chosen = {"out": path.parent / "out", **options}
        return loop.run(resolve_auto(load_recipe(str(path), overrides)), loop.Options(**chosen))

    return run


@pytest.fixture
def stop_at() -> StopAt:
    """Makes a progress callback that raises an error when a number of epochs is done."""

    def make(epoch: int, error: BaseException) -> Callable[[int, int], None]:
        def progress(done: int, total: int) -> None:
            if done == epoch:
                raise error

        return progress

    return make


def toy_result(ledger: Sequence[str] = (), delta: float = 1e-5, trials: int = 2) -> ResultContent:
    """A result of private trials that were never trained: `ledger` has its lines, and the rest fits."""
    privacy: dict[str, Any] = {"epsilon": 1.0, "delta": delta, "rho": None, "adjacency": "zero-out"}
    privacy |= {"accountant": "zcdp", "bound": "upper", "noise_source": "secure", "declarations": []}
    privacy |= {"batching": "shuffle", "budget_covers": "total", "uncovered_steps": []}
    rows: list[dict[str, Any]] = [
        {"trial": i, "seed": None, "epochs": 2, "test_accuracy": 0.5 if i == 0 else None} for i in range(trials)
    ]
    return ResultContent(
        name="toy",
        privacy=privacy,
        metrics={"test_accuracy": {"mean": None, "std": None, "ci95": None, "n": trials}},
        timing={"steps": 2},
        provenance={"version": "0"},
        trials=rows,
        history=[{"trial": 0, "epoch": 0}, {"trial": 0, "epoch": 1, "test_accuracy": 0.25}],
        ledger=list(ledger),
    )


def write_result(directory: Path, result: ResultContent, recipe_text: str, model: bytes | None = None) -> None:
    """Put a result where a run would."""
    staged = [(store.stage_result(directory, dataclasses.replace(result, recipe=recipe_text, model=model)), directory)]
    try:
        store.keep([hidden for hidden, _ in staged])
        store.publish(staged)
    finally:
        store.discard(staged)


OWN: dict[str, Any] = {"path": "tiny.npz", "bounds": [0, 1], "classes": [0, 1, 2]}
PCA = [{"scale": {}}, {"pca": {"components": 2, "noise_multiplier": 5}}]
GRADIENT: dict[str, Any] = {"kind": "dp-sgd", "batch_size": 12, "learning_rate": 0.5}
UNIFORM = {"kind": "uniform", "initial": 4}

WAYS: dict[str, dict[str, Any]] = {
    "poisson-pld": {"privacy": {"budget": {"epsilon": 4, "delta": 1e-3}}},
    "poisson-rdp-pca": {"data": OWN | {"preprocess": PCA}},
    "poisson-pld-pca": {"data": OWN | {"preprocess": PCA}, "privacy": {"schedule": UNIFORM, "delta": 1e-3}},
    "poisson-replaced": {"privacy": {"budget": {"epsilon": 4, "delta": 1e-3}, "adjacency": "replace-one"}},
    "fixed": {"method": GRADIENT | {"batching": "fixed"}, "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}}},
    "random-allocation": {
        "method": GRADIENT | {"batching": "random-allocation"},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}},
    },
    "shuffle": {"method": GRADIENT | {"batching": "shuffle"}, "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}}},
    "shuffle-rho-pca": {
        "data": OWN | {"preprocess": PCA},
        "method": GRADIENT | {"batching": "shuffle"},
        "privacy": {
            "budget": {"rho": 0.5},
            "delta": 1e-3,
            "schedule": {"kind": "exponential", "initial": 4, "decay": 0.1},
        },
        "epochs": "until-budget",
    },
    "full-adam": {
        "method": {"kind": "dp-sgd", "batching": "full", "optimizer": {"kind": "adam"}, "averaging": {"kind": "ema"}},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}, "adjacency": "replace-one"},
        "epochs": 5,
    },
    "full-momentum-per-layer": {
        "model": {"kind": "mlp", "hidden": [3]},
        "method": {"kind": "dp-sgd", "batching": "full", "optimizer": {"kind": "sgd", "momentum": 0.9}},
        "privacy": {
            "schedule": UNIFORM,
            "delta": 1e-3,
            "clipping": {"kind": "per-layer", "norm": 0.5, "noise": "as-published"},
        },
        "epochs": 4,
    },
    "poisson-quantile": {
        "privacy": {
            "budget": {"epsilon": 4, "delta": 1e-3},
            "clipping": {"kind": "quantile", "count_noise": 3, "learning_rate": 0.5},
        },
    },
    "shuffle-validation": {
        "data": OWN | {"validation": {"records": 12, "noise_multiplier": 8}},
        "method": GRADIENT | {"batching": "shuffle", "learning_rate": {"kind": "cosine", "initial": 0.5}},
        "privacy": {
            "budget": {"rho": 0.5},
            "delta": 1e-3,
            "schedule": {"kind": "validation", "initial": 4, "decay": 0.5, "threshold": 0.1, "period": 2},
        },
        "epochs": "until-budget",
    },
    "private-selection": {
        "method": {
            "kind": "private-selection",
            "batching": "shuffle",
            "batch_size": 4,
            "candidates": [UNIFORM, {"kind": "exponential", "initial": 4, "decay": 0.2}],
        },
        "privacy": {"budget": {"rho": 0.5}, "delta": 1e-3},
    },
    "poisson-banded": {
        "method": GRADIENT | {"batching": "poisson"},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}, "noise": {"kind": "banded", "bands": 3}},
    },
    "shuffle-banded": {
        "method": GRADIENT | {"batching": "shuffle"},
        "privacy": {"budget": {"rho": 0.5}, "delta": 1e-3, "noise": {"kind": "banded", "bands": 3}},
    },
}
"""Sections for `write_recipe`: every batching with its accountants, preprocessing, updates and clipping."""


def left_in(out: Path) -> set[str]:
    """What lies in a folder of results, finished results by their recipe's name."""
    return {path.name.rpartition("-")[0] if path.is_dir() else path.name[:6] for path in out.iterdir()}


def table(directory: Path, name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of a result."""
    with (directory / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Replaced:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(vars(module) | names)
