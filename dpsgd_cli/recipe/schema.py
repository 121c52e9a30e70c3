"""The schema of recipes: one pydantic model per section, with a description of every field and all defaults.

Everything that can change the guarantee is in `privacy:`, and nothing that can is in `runtime:`. `recipe/loading.py`
reads the YAML, `accounting/plan.py` computes the price, `training/loop.py` runs the recipe.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from dpsgd_cli.accounting.accountants import ACCOUNTANTS
from dpsgd_cli.accounting.adjacency import BATCHINGS, NEIGHBOURS, Adjacency
from dpsgd_cli.accounting.budget import Budget, EpsilonBudget
from dpsgd_cli.calibration.price import Calibration
from dpsgd_cli.clipping.settings import Clipping, FlatClipping
from dpsgd_cli.common.sections import Count, Delta, NonNegative, Section
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.settings import HuggingFaceModel, Model
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.dp_sgd.settings import Preconditioned
from dpsgd_cli.methods.settings import Method
from dpsgd_cli.noise.settings import CorrelatedNoise, IndependentNoise, Noise, NoiseSource
from dpsgd_cli.preconditioning.price import Preconditioner
from dpsgd_cli.recipe.agreement import method_problems
from dpsgd_cli.schedules.settings import ByRule, Schedule
from dpsgd_cli.users.settings import Unit

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
        " models on an A100, H100 or a later GPU, whose tensor cores then also multiply for norms and sums (no GPU has"
        " run this yet). tf32: rounds products of passes alone, on the same GPUs. On a CPU and on older GPUs: float32.",
    )
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="Run steps as programs that torch.compile makes (needs a C++ compiler; not with tf32). On an H100,"
        " compiling a small network took 20 s and made its steps 4 to 9 times as fast; bfloat16 was not yet compiled"
        " there. auto: on a GPU, for at least 10,000 steps of a model that can be compiled; never on a CPU.",
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


class Recipe(Section):
    """One experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)] = Field(
        description="Names the result directory."
    )
    description: str = Field("", description="The question that the experiment answers.")
    data: Data
    model: Model = Field(description="What is trained.")
    method: Method = Field(description="How it is trained, and how records reach a step.")
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

    @model_validator(mode="after")
    def _resolved(self) -> Recipe:
        """Tell the data section, once, what the other sections decide; refuse sections that do not agree."""
        privacy, problems = self.privacy, list[str]()
        self.__dict__["data"] = self._data()
        problems += method_problems(self)
        if privacy is not None and privacy.noise_source == "secure" and self.seed is not None:
            problems.append("privacy.noise_source: secure cannot be seeded; leave seed out")
        if privacy is not None and privacy.noise_source == "seeded" and self.seed is None:
            problems.append("privacy.noise_source: seeded needs a seed")
        if privacy is not None and privacy.book is not None and self.seed is not None:
            problems.append(
                "seed: noise from a seed can be computed again, so it is no private release, which a book counts; leave"
                " seed out (seed=null), or leave privacy.book out of an experiment"
            )
        if privacy is not None and self.data.coins is not None:
            problems.append("data.coins: is for recipes without privacy; with it, the adjacency decides: leave it out")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _data(self) -> Data:
        """Return the data section with the tokenizer of the model, private held-out records, and what protects them."""
        data, text, private = self.data, self.data.text, self.privacy is not None
        if text is not None and text.folder is None and text.words is None:
            if not isinstance(self.model, HuggingFaceModel):
                raise ValueError(
                    "data.text.folder: missing; give the folder of a tokenizer, or words: 4096 for hashed words"
                )
            data = data.changed(text=text.changed(folder=self.model.folder, public=True))
        coins = data.coins or ("content" if NEIGHBOURS[self.adjacency].counted else "place")
        unit = None if self.privacy is None else self.privacy.unit
        data = data.measured(self.folds) if private else data
        return data.protecting(unit, self.folds, by_place=coins == "place", private=private)

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
    def preconditioner(self) -> Preconditioner | None:
        """Return the method's preconditioner, which is released before training; None if there is none."""
        return self.method.conditioned if isinstance(self.method, Preconditioned) else None

    @property
    def inference_share(self) -> float | None:
        """Return the share of the budget that the rounds of `intervals/price.py` get; None without them."""
        asked = isinstance(self.method, Preconditioned) and self.method.inference is not None
        return self.method.inference_share if isinstance(self.method, Preconditioned) and asked else None

    @property
    def calibration(self) -> Calibration | None:
        """Return the settings of calibration; None without it."""
        return self.method.calibrated if isinstance(self.method, Preconditioned) else None

    @property
    def trials(self) -> int:
        """Return the number of trials: repeats times folds."""
        return self.repeats * (self.folds or 1)

    @property
    def seeds(self) -> list[int | None]:
        """Return the seed of each trial; None if its randomness comes from the operating system."""
        return [None if self.seed is None else self.seed + trial for trial in range(self.trials)]
