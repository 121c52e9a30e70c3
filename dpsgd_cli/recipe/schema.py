"""What a recipe may say: one pydantic model per section, every field described, every default here.

Not here: reading YAML (`loading.py`), what a recipe costs (`privacy/plan.py`), how it runs (`experiment.py`).
`privacy:` holds everything that can change the guarantee; `runtime:` nothing that can.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] < pair[1]:
        raise ValueError(f"is {list(pair)}, but must be [low, high] with low < high")
    return pair


def _distinct(values: list[Any]) -> list[Any]:
    twice = next((value for index, value in enumerate(values) if str(value) in map(str, values[:index])), None)
    if twice is not None or not values:
        raise ValueError(f"lists {twice!r} twice" if values else "is empty")
    return values


Interval = Annotated[tuple[float, float], AfterValidator(_ascending)]
Values = Annotated[list[Any], AfterValidator(_distinct)]


class Section(BaseModel):
    """Unknown keys are errors; a resolved recipe never changes.

    A validator's message is one line per problem; a line that begins with `key.path: ` is reported at that key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# --- data ---------------------------------------------------------------------------------------------


class OneHot(Section):
    columns: list[str] | None = Field(None, description="Categorical columns to expand; all of them when left out.")


class Scale(Section):
    by: Literal["bounds", "standard", "min-max"] = Field(
        "bounds",
        description="`bounds` maps each numeric column from its public [low, high] to [0, 1] (values outside are"
        " clamped); `standard` and `min-max` are fitted on the training rows, which is NOT private and is recorded.",
    )
    to: Interval = Field((0.0, 1.0), description="Target interval of `bounds` and `min-max`.")


class UnitNorm(Section):
    at_most: bool = Field(False, description="Only shrink rows longer than 1 instead of normalising every row.")


class Bias(Section):
    value: float = Field(1.0, description="Constant of the appended column.")


class Pca(Section):
    components: Count = Field(description="Number of principal directions kept.")
    noise_multiplier: Positive | None = Field(
        None, description="Gaussian noise on the covariance of unit-norm rows, charged to the ledger."
    )
    public: bool = Field(False, description="Declare the covariance public: no noise, recorded as a declaration.")

    @model_validator(mode="after")
    def _one_way(self) -> Pca:
        if (self.noise_multiplier is None) == (not self.public):
            raise ValueError("give either noise_multiplier (private) or public: true")
        return self


PREPROCESS: dict[str, type[Section]] = {
    "one-hot": OneHot,
    "scale": Scale,
    "unit-norm": UnitNorm,
    "bias": Bias,
    "pca": Pca,
}


class PreprocessStep(Section):
    """One step of the pipeline: a mapping with exactly one of these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    one_hot: OneHot | None = Field(None, alias="one-hot", description="Expand categorical columns.")
    scale: Scale | None = Field(None, description="Scale numeric columns.")
    unit_norm: UnitNorm | None = Field(None, alias="unit-norm", description="Divide each row by its L2 norm.")
    bias: Bias | None = Field(None, description="Append a constant column.")
    pca: Pca | None = Field(None, description="Project onto principal directions.")

    @model_validator(mode="after")
    def _exactly_one(self) -> PreprocessStep:
        if len(self.model_fields_set) != 1 or self.step is None:
            raise ValueError(f"each step needs exactly one of {', '.join(PREPROCESS)} ({{}} for its defaults)")
        return self

    @property
    def kind(self) -> str:
        """The YAML key of the step that is set."""
        field = next(iter(self.model_fields_set))
        return str(type(self).model_fields[field].alias or field)

    @property
    def step(self) -> Section | None:
        """The settings of the step that is set."""
        return next((getattr(self, name) for name in self.model_fields_set), None)


class Split(Section):
    test: Annotated[float, Field(gt=0, lt=1)] | Count = Field(
        0.2, description="Test rows, as a fraction or a count; drawn without looking at any value."
    )
    seed: int = Field(0, description="Seed of the split; the same for every trial.")


class Data(Section):
    """A card by `name`, or a file of the user's own by `path`."""

    name: str | None = Field(None, description="A data set card: `dpsgd data list` shows them.")
    path: str | None = Field(None, description="Your own .csv, .npz or .parquet file, relative to the recipe.")
    test_path: str | None = Field(None, description="A second file that holds the test rows; otherwise see `split`.")
    target: str | None = Field(None, description="Label column (csv, parquet) or array (npz: default `y`).")
    task: Literal["classification", "regression"] = Field("classification", description="What the label is.")
    classes: Values | None = Field(None, description="Public list of class labels; else read and declared public.")
    categorical: dict[str, Values] | list[str] | None = Field(
        None, description="Categorical columns, with their public values; a bare list reads and declares the values."
    )
    bounds: dict[str, Interval] | Interval | None = Field(
        None, description="Public [low, high] of numeric columns, by name, or one pair for all of them."
    )
    drop: list[str] = Field(default_factory=list, description="Columns to leave out.")
    split: Split | None = Field(None, description="Cut a test set from the file; the card's own split otherwise.")
    preprocess: list[PreprocessStep] | None = Field(
        None, description="Steps in order; left out, the card's own default (a file: scale by bounds, then one-hot)."
    )

    @model_validator(mode="after")
    def _card_or_file(self) -> Data:
        if (self.name is None) == (self.path is None):
            raise ValueError("give either name (a card) or path (your own file)")
        if self.path is None:
            extra = [
                key for key in ("test_path", "target", "categorical", "bounds", "classes", "drop") if getattr(self, key)
            ]
            if self.task != "classification":
                extra.append("task")
            if extra:
                raise ValueError(f"{', '.join(extra)}: only for a file of your own (path); the card says it already")
        elif self.target is None and not self.path.endswith(".npz"):
            raise ValueError("a csv or parquet file needs target, the name of the label column")
        return self


# --- model --------------------------------------------------------------------------------------------


class LinearModel(Section):
    kind: Literal["linear"] = "linear"
    bias: bool = Field(True, description="Whether the layer has a bias of its own.")


class MlpModel(Section):
    kind: Literal["mlp"] = "mlp"
    hidden: list[Count] = Field(default=[100], description="Widths of the hidden layers.")
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("relu", description="Between the layers.")


class CnnModel(Section):
    """The small convolutional network of Papernot et al. (2021): two convolutions, two dense layers."""

    kind: Literal["cnn"] = "cnn"
    activation: Literal["relu", "tanh", "sigmoid", "gelu"] = Field("tanh", description="Between the layers.")


class PythonModel(Section):
    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.")
    factory: str = Field("build", description="Function `(input_shape, outputs) -> torch.nn.Module` in that file.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the factory.")


Model = Annotated[LinearModel | MlpModel | CnnModel | PythonModel, Field(discriminator="kind")]


# --- method -------------------------------------------------------------------------------------------


class Sgd(Section):
    kind: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Heavy-ball momentum.")


class Adam(Section):
    kind: Literal["adam"] = "adam"
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of the two moment averages.")
    stability: Positive = Field(1e-8, description="Added to the root of the second moment.")


Optimizer = Annotated[Sgd | Adam, Field(discriminator="kind")]


class Ema(Section):
    kind: Literal["ema"] = "ema"
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(0.999, description="Weight of the past per step.")


class Gradient(Section):
    """What every gradient method shares."""

    batching: Literal["poisson", "shuffle", "full"] = Field("poisson", description="How records reach a step.")
    batch_size: Count | None = Field(None, description="Expected (poisson) or exact (shuffle) size; none for full.")
    learning_rate: Positive = Field(0.1, description="Step length on the mean-scaled gradient.")
    optimizer: Optimizer = Field(Sgd(), description="How a gradient becomes an update.")
    weight_decay: NonNegative = Field(0.0, description="L2 coefficient; reads no data.")
    averaging: Ema | None = Field(None, description="Release averaged weights instead of the last.")

    @model_validator(mode="after")
    def _batch_size_goes_with_batching(self) -> Gradient:
        if (self.batching == "full") != (self.batch_size is None):
            raise ValueError(f"batching: {self.batching} {'takes no' if self.batch_size else 'needs a'} batch_size")
        return self


class SgdMethod(Gradient):
    """No clipping, no noise, no privacy: the yardstick."""

    kind: Literal["sgd"] = "sgd"


class DpSgdMethod(Gradient):
    kind: Literal["dp-sgd"] = "dp-sgd"


class PythonMethod(Gradient):
    """A user's own method: a class deriving from `dpsgd_cli.methods.Method`."""

    kind: Literal["python"] = "python"
    file: str = Field(description="A Python file, relative to the recipe.")
    factory: str = Field("method", description="The Method class (or a factory of one) in that file.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Whatever the method reads for itself.")


Method = Annotated[SgdMethod | DpSgdMethod | PythonMethod, Field(discriminator="kind")]


# --- privacy ------------------------------------------------------------------------------------------


class FlatClipping(Section):
    kind: Literal["flat"] = "flat"
    norm: Positive = Field(1.0, description="L2 bound C of one record's whole gradient.")


class PerLayerClipping(Section):
    kind: Literal["per-layer"] = "per-layer"
    norm: Positive | list[Positive] = Field(1.0, description="L2 bound C_l of each layer, or one per layer.")
    noise: Literal["joint", "as-published"] = Field(
        "joint",
        description="`joint`: noise z * sqrt(sum C_l^2) everywhere. `as-published`: noise z * C_l on layer l of M,"
        " which is charged what it costs, noise multiplier z / sqrt(M).",
    )


Clipping = Annotated[FlatClipping | PerLayerClipping, Field(discriminator="kind")]
Auto = Literal["auto"]


class Uniform(Section):
    kind: Literal["uniform"] = "uniform"
    initial: Positive | Auto = Field("auto", description="Noise multiplier of every epoch; auto: the least allowed.")


class TimeDecay(Section):
    kind: Literal["time"] = "time"
    initial: Positive = Field(description="Noise multiplier of epoch 0.")
    decay: Positive = Field(description="k in initial / (1 + k t).")


class ExponentialDecay(Section):
    kind: Literal["exponential"] = "exponential"
    initial: Positive = Field(description="Noise multiplier of epoch 0.")
    decay: Positive = Field(description="k in initial * exp(-k t).")


class StepDecay(Section):
    kind: Literal["step"] = "step"
    initial: Positive = Field(description="Noise multiplier of epoch 0.")
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(description="k in initial * k^floor(t / period).")
    period: Count = Field(10, description="Epochs between two steps.")


class PolynomialDecay(Section):
    kind: Literal["polynomial"] = "polynomial"
    initial: Positive = Field(description="Noise multiplier of epoch 0.")
    final: Positive = Field(description="Noise multiplier from epoch `period` on.")
    decay: Positive = Field(description="Power k in (initial - final) (1 - t/period)^k + final.")
    period: Count = Field(100, description="Epochs until the final value.")


Schedule = Annotated[Uniform | TimeDecay | ExponentialDecay | StepDecay | PolynomialDecay, Field(discriminator="kind")]


class RhoBudget(Section):
    rho: Positive = Field(description="Total zCDP.")


class EpsilonBudget(Section):
    epsilon: Positive = Field(description="Total epsilon.")
    delta: Delta = Field(description="At this delta.")


class Privacy(Section):
    adjacency: Literal["add-remove", "replace-one", "zero-out"] | None = Field(
        None, description="Which data sets count as neighbours; left out, the batching's own (see README)."
    )
    clipping: Clipping = Field(FlatClipping(), description="How one record's gradient is bounded.")
    schedule: Schedule = Field(Uniform(), description="The noise multiplier by epoch.")
    budget: RhoBudget | EpsilonBudget | None = Field(None, description="What a trial may spend.")
    budget_covers: Literal["total", "training"] = Field(
        "total", description="`training` leaves private preprocessing out of the budget (never out of the total)."
    )
    delta: Delta | None = Field(None, description="Delta of the statement; the budget's own when it has one.")
    accountant: Literal["auto", "zcdp", "gaussian", "rdp", "pld"] = Field(
        "auto",
        description="Who polices an epsilon budget and states epsilon. auto: pld for poisson, gaussian (exact) otherwise.",
    )
    noise_source: Literal["seeded", "secure"] | None = Field(
        None, description="seeded: reproducible, for experiments; secure: operating-system entropy (no seed)."
    )


# --- the whole ----------------------------------------------------------------------------------------


class Runtime(Section):
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Of parameters and data.")
    threads: Count | None = Field(None, description="CPU threads; torch's own choice when left out.")
    micro_batch: Count | None = Field(None, description="Most rows per trial held at once; memory only.")
    checkpoint_seconds: NonNegative = Field(30.0, description="Least time between two checkpoints.")
    evaluate_every: Count = Field(1, description="Epochs between two evaluations; the last one always is.")


class Recipe(Section):
    """One experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)] = Field(
        description="Names the result directory."
    )
    description: str = Field("", description="The question that the experiment answers.")
    data: Data
    model: Model
    method: Method
    privacy: Privacy | None = Field(None, description="Needed by every private method, refused by `sgd`.")
    runtime: Runtime = Field(Runtime(), description="Where and how fast it runs; never what is guaranteed.")
    epochs: Count | Literal["until-budget"] = Field("until-budget", description="How long to train.")
    seed: int | None = Field(None, ge=0, description="First trial's seed (trial i uses seed + i); none: secure.")
    repeats: Count = Field(1, description="Trials, trained together.")
    save_model: bool = Field(False, description="Write model.safetensors.")

    @model_validator(mode="after")
    def _method_and_privacy_agree(self) -> Recipe:
        problems = []
        if self.method.kind == "sgd" and self.privacy is not None:
            problems.append("privacy: method sgd has no privacy; leave this section out or use dp-sgd")
        if self.method.kind == "sgd" and self.epochs == "until-budget":
            problems.append("epochs: method sgd has no budget to stop at; give a number")
        if self.method.kind == "dp-sgd" and self.privacy is None:
            problems.append("method: dp-sgd needs a privacy section")
        if self.privacy is not None:
            if self.privacy.noise_source == "secure" and self.seed is not None:
                problems.append("privacy.noise_source: secure cannot be seeded; leave seed out")
            if self.privacy.noise_source == "seeded" and self.seed is None:
                problems.append("privacy.noise_source: seeded needs a seed")
        if problems:
            raise ValueError("\n".join(problems))
        return self
