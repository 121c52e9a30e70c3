"""Experiments, which are all that a method knows of a recipe; descriptors, all that others know of a method; planning.

`Experiment` has every section of a recipe. `recipe/schema.py` adds which methods there are and how sections agree.
Everything that can change the guarantee is in `privacy:`, and nothing that can is in `runtime:`.

To add a method: a file with its section and descriptor, and its name in the union `Method` (`settings.py`); a
subclass of `dpsgd_cli.methods.base.Method` that runs it; a planner, unless it uses the gradient plan.
Nothing else lists methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from dpsgd_cli.accounting.accountants import ACCOUNTANTS
from dpsgd_cli.accounting.adjacency import BATCHINGS, Adjacency, Batching
from dpsgd_cli.accounting.budget import Budget, EpsilonBudget
from dpsgd_cli.accounting.plan import Facts, Plan, Sampling
from dpsgd_cli.calibration.price import Calibration
from dpsgd_cli.clipping.settings import Clipping, FlatClipping
from dpsgd_cli.common.plugins import named
from dpsgd_cli.common.sections import Count, Delta, NonNegative, Section
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.settings import Model
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.settings import CorrelatedNoise, IndependentNoise, Noise, NoiseSource
from dpsgd_cli.preconditioning.price import Preconditioner
from dpsgd_cli.schedules.settings import ByRule, Schedule
from dpsgd_cli.users.settings import Unit

P = TypeVar("P", bound=Plan)
EVERY_NEIGHBOUR: tuple[Adjacency, ...] = ("add-remove", "replace-one", "zero-out")
ITS_BUDGET = ("privacy.budget", "privacy.budget_covers", "privacy.delta")
ITS_TRAINING = (
    *ITS_BUDGET,
    *("epochs", "privacy.schedule", "privacy.accountant", "privacy.clipping.norm"),
    *(f"privacy.clipping.{name}" for name in ("quantile", "learning_rate", "count_noise", "initial")),
    *("method.learning_rate", "method.weight_decay", "model.l2", "model.radius"),
)


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """Properties of a method. Fields that the guarantee depends on have no default; the others default to "no".

    `runs` and `planner` are `module:name`, imported when they are needed, so that a recipe is read without torch.
    `runs`: the class that trains. `planner`: a function from a recipe and the facts about its data to a plan; None for
    a method that refuses privacy.
    `privacy`: a privacy section is needed, refused or optional.
    `adjacencies`: the adjacencies that the proof covers; empty if the method refuses privacy.
    `minibatch`: the method trains step by step over batches of one public width. So passes may be rounded
    (`engine/precision.py` has the proof), compiled, and run on augmented records.
    `distributable`: the method uses the data only in the sum of `Team.add_up`, so several processes may train it and
    rows may stay on disk.
    `only_convex`: the method is for `model.kind: convex` alone, for example because its proof needs convexity.
    `auto_tunable`: the formulas of `training/auto_rule.py` choose its `auto` settings, if they cover the model as well.
    `correlates`: every sum that it releases has the noise of its plan, which may be correlated.
    `adaptive_clipping`: clip bounds may be computed from its releases (`clipping/bounds.py`).
    `by_unit`: the sensitivity of its releases is also proved if all rows of a user are protected together: it uses the
    mean of a user's clipped or bounded parts, and no row on its own.
    `discovers`: what its budget covers of private columns (`discovery/price.py`): bounds, which are one Gaussian, or
    also names of categories, which cost a delta.
    `per_trial_keys`: keys that are read trial by trial, so that recipes which differ in them train as one pack.
    """

    runs: str
    planner: str | None
    privacy: Literal["needed", "refused", "optional"]
    adjacencies: tuple[Adjacency, ...]
    only_convex: bool
    minibatch: bool = False
    distributable: bool = False
    auto_tunable: bool = False
    per_trial_keys: tuple[str, ...] = ()
    correlates: bool = False
    adaptive_clipping: bool = False
    by_unit: bool = False
    discovers: Literal["nothing", "bounds", "names"] = "nothing"

    def __post_init__(self) -> None:
        stated = self.planner is not None and bool(self.adjacencies)
        if stated == (self.privacy == "refused"):
            raise ValueError(f"{self.runs}: a planner and adjacencies go with privacy, and with nothing else")


class MethodSection(Section):
    """Base of all method sections."""

    must_state: ClassVar[tuple[str, ...]] = ("descriptor",)
    descriptor: ClassVar[Descriptor]

    if TYPE_CHECKING:  # fields that each section declares with its own values
        kind: str
        batching: Batching

    @property
    def described(self) -> Descriptor:
        """Return the method's descriptor under these settings."""
        return self.descriptor

    @property
    def batch(self) -> int | None:
        """Return the expected or exact size of a batch; None for all records."""
        return None

    @property
    def conditioned(self) -> Preconditioner | None:
        """Return the preconditioner, which is released before training; None without one or while it is `auto`."""
        return None

    @property
    def inferred(self) -> float | None:
        """Return the share of the budget for the rounds of `intervals/price.py`; None without them."""
        return None

    @property
    def calibrated(self) -> Calibration | None:
        """Return the settings of calibration; None without it or while they are `auto`."""
        return None


class FullBatch(MethodSection):
    """Base of the methods that use every record in every step."""

    batching: Literal["full"] = Field("full", description="Every record in every step.")


_ACCOUNTANTS = ("auto", *(name for name, listed in ACCOUNTANTS.items() if listed.in_recipes))


def _accountant(name: str) -> str:
    if name not in _ACCOUNTANTS:
        raise PydanticCustomError("enum", "is not the name of an accountant")
    return name


class Privacy(Section):
    adjacency: Adjacency | None = Field(
        None, description="Which data sets count as neighbours; left out, the batching's own (docs/guarantees.md)."
    )
    unit: Unit | None = Field(
        None, description="Protect all rows of a user together; left out, a statement is about one record at a time."
    )
    clipping: Clipping = Field(FlatClipping(), description="How one record's (or user's) gradient is bounded.")
    schedule: Schedule = Field(ByRule(), description="The noise multiplier by epoch.")
    budget: Budget = Field(None, description="What a trial may spend.")
    budget_covers: Literal["total", "training"] = Field(
        "total", description="`training` leaves private preprocessing out of the budget (never out of the total)."
    )
    delta: Delta | None = Field(None, description="Delta of the statement; the budget's own when it has one.")
    accountant: Annotated[
        str, AfterValidator(_accountant), WithJsonSchema({"type": "string", "enum": list(_ACCOUNTANTS)})
    ] = Field(
        "auto",
        description="Theorem that enforces an epsilon budget, gives the least noise for it and states epsilon. auto:"
        " exact (gaussian) for full and shuffle, else the least upper bound of all that apply.",
    )
    book: str | None = Field(
        None,
        description="The budget book of the table, relative to the recipe: `dpsgd budget create` makes one. What a"
        " run may release is charged to it before the run starts.",
        examples=["patients.book"],
    )
    start: str | None = Field(
        None,
        description="Folder of a private result, relative to the recipe, whose weights the training starts from. The"
        " statement is then of both: their epsilons and their deltas add up.",
        examples=["results/first-1a2b3c4d"],
    )
    noise: Noise | None = Field(
        None, description="Correlation of the noise between steps; left out, all noise is independent."
    )
    noise_source: NoiseSource | None = Field(
        None, description="seeded: reproducible, for experiments; secure: operating-system entropy (no seed)."
    )

    @property
    def correlated(self) -> CorrelatedNoise | None:
        """Return the kind of noise if it is correlated between steps; None for independent noise."""
        if self.noise is None or isinstance(self.noise, IndependentNoise):
            return None
        return self.noise

    @property
    def required_correlated(self) -> CorrelatedNoise:
        """Return the kind of correlated noise; only for recipes that are known to have one."""
        assert self.correlated is not None
        return self.correlated

    @property
    def stated_delta(self) -> float:
        """The delta of the statement, in (0, 1); PrivacyError if none is given, or two that differ."""
        stated = self.budget.delta if isinstance(self.budget, EpsilonBudget) else None
        if stated is not None and self.delta not in (None, stated):
            raise PrivacyError(f"privacy.delta is {self.delta}, but privacy.budget.delta is {stated}; give one")
        delta = stated or self.delta
        if delta is None:
            raise PrivacyError("no delta: give privacy.delta (smaller than 1 / number of records, say 1.0e-5)")
        return delta


class Runtime(Section):
    """The `runtime:` section. Nothing in it can change the guarantee."""

    device: (
        Literal["auto", "cpu", "cuda"]
        | Annotated[str, Field(pattern=r"^cuda:[0-9]{1,4}$", json_schema_extra={"x-form": "cuda:N"})]
    ) = Field("auto", description="auto (a GPU where there is one), cpu, cuda or cuda:N.")
    dtype: Literal["float32", "float64", "bfloat16", "tf32"] = Field(
        "float32",
        description="Of passes through a model; parameters, norms, sums and noise stay float32. bfloat16: for large"
        " models on an A100, H100 or a later GPU, whose tensor cores then also multiply for norms and sums. tf32:"
        " rounds products of passes alone, on the same GPUs. On a CPU and on older GPUs: float32.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="auto: on a GPU, start the kernels of a step together, as a CUDA graph, from 20 steps of a model"
        " that draws nothing at random; its Python code then runs only once. true: make one program of a step by"
        " torch.compile, for long trainings (needs a C++ compiler; not with tf32): on an H100, compiling a small"
        " network took 20 s and made its steps 4 to 9 times as fast. false: neither, as auto on a CPU.",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="CPU threads; torch's own choice when left out."
    )
    micro_batch: Count | None = Field(None, description="Most rows per trial held at once; memory only.")
    checkpoint_seconds: NonNegative = Field(30.0, description="Least time between two checkpoints.")
    evaluate_every: Count = Field(1, description="Epochs between two evaluations; the last one always is.")
    track: Literal["mlflow"] | None = Field(
        None, description="Log settings, public metrics and the ledger as an MLflow run, once the result is written."
    )


class Experiment(Section):
    """A recipe as a method gets it, whichever method it names (`recipe/schema.py`)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)] = Field(
        description="Names the result directory."
    )
    description: str = Field("", description="The question that the experiment answers.")
    data: Data
    model: Model = Field(description="What is trained.")
    method: MethodSection
    privacy: Privacy | None = Field(None, description="Needed by every private method, refused by `sgd`.")
    runtime: Runtime = Field(Runtime(), description="Where and how fast it runs; never what is guaranteed.")
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["until-budget", "auto"] = Field(
        "auto", description="How long to train; auto: from public facts where noise is solved for, else until-budget."
    )
    seed: int | None = Field(None, ge=0, description="First trial's seed (trial i uses seed + i); none: secure.")
    repeats: Annotated[int, Field(ge=1, le=100_000)] = Field(1, description="Trials, trained together.")
    folds: Annotated[int, Field(ge=2, le=100)] | None = Field(
        None, description="K-fold cross-validation of all records: K x repeats trials (trial t is fold t % K)."
    )
    save_model: bool | None = Field(
        None, description="Write model.safetensors; left out, `train` does, sweeps and comparisons do not."
    )

    @property
    def adjacency(self) -> Adjacency:
        """Return the adjacency of the recipe's statement: the one it names, or the default of its batching."""
        stated = None if self.privacy is None else self.privacy.adjacency
        return stated or BATCHINGS[self.method.batching].adjacency

    @property
    def required_privacy(self) -> Privacy:
        """The privacy section; PrivacyError if there is none."""
        if self.privacy is None:
            raise PrivacyError(
                f"method {self.method.kind} has no privacy section, so it releases nothing under differential privacy"
                " and there is nothing to plan"
            )
        return self.privacy

    @property
    def length(self) -> int | Literal["until-budget"]:
        """Return the number of epochs; `until-budget` while it is `auto`."""
        return "until-budget" if self.epochs == "auto" else self.epochs

    @property
    def trials(self) -> int:
        """Return the number of trials: repeats times folds."""
        return self.repeats * (self.folds or 1)

    @property
    def seeds(self) -> list[int | None]:
        """Return the seed of each trial; None if its randomness comes from the operating system."""
        return [None if self.seed is None else self.seed + trial for trial in range(self.trials)]

    def planned(self, kind: type[P], facts: Facts, **own: Any) -> P:
        """Return a plan of full batches that releases nothing yet; `own` are the fields that differ from that."""
        privacy = self.required_privacy
        usual: dict[str, Any] = {
            "sampling": Sampling("full", facts.records, facts.records, self.adjacency),
            "noise_multipliers": (),
            "sensitivity": 1.0,
            "preprocessing_releases": tuple(facts.preprocessing_releases),
            "epochs": (),
            "accountant": privacy.accountant,
            "delta": privacy.stated_delta,
            "budget": privacy.budget,
            "covers_before": privacy.budget_covers == "total",
            "is_adaptive": False,
        }
        return kind(**usual | own)


def plan_for(recipe: Experiment, facts: Facts) -> Plan:
    """Return the plan of a private recipe.

    Raises PrivacyError if no guarantee covers it, and InfeasibleBudget if nothing fits the budget.
    """
    method = recipe.method
    if method.described.planner is None:
        raise PrivacyError(f"method {method.kind} has no guarantee to plan; leave privacy out")
    planner: Callable[[Experiment, Facts], Plan] = named(method.described.planner)
    plan = planner(recipe, facts)
    if plan.sampling.adjacency not in method.described.adjacencies:
        proved = " or ".join(method.described.adjacencies)
        raise PrivacyError(
            f"method {method.kind} is proved for privacy.adjacency: {proved}, not {plan.sampling.adjacency}"
        )
    return plan
