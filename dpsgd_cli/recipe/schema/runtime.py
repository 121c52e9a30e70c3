"""The `runtime:` section: nothing here can change the guarantee."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Count, NonNegative, Section


class Runtime(Section):
    device: (
        Literal["auto", "cpu", "cuda"]
        | Annotated[str, Field(pattern=r"^cuda:[0-9]{1,4}$", json_schema_extra={"x-form": "cuda:N"})]
    ) = Field("auto", description="auto (a GPU where there is one), cpu, cuda or cuda:N.")
    dtype: Literal["float32", "float64", "bfloat16", "tf32"] = Field(
        "float32",
        description="Of passes through a model. With bfloat16 and tf32 (a GPU's rounded products), parameters, norms,"
        " sums and noise stay float32.",
    )
    compile: bool = Field(
        False,
        description="Run steps as programs that torch.compile makes (float32 and float64; needs a C++ compiler, and"
        " some seconds a layer before the first step, so it pays in long trainings).",
    )
    threads: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="CPU threads; torch's own choice when left out."
    )
    micro_batch: Count | None = Field(None, description="Most rows per trial held at once; memory only.")
    checkpoint_seconds: NonNegative = Field(30.0, description="Least time between two checkpoints.")
    evaluate_every: Count = Field(1, description="Epochs between two evaluations; the last one always is.")
    tensorboard: bool = Field(
        False, description="Write history.csv's columns as TensorBoard event files too, as far as checkpoints are."
    )
