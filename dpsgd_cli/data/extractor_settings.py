"""The `data.features:` section: frozen extractors of features, which act on each record alone.

`features.py` has their code.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dpsgd_cli.common.sections import Count, Section


class Extractor(Section):
    """A frozen feature extractor. It runs before any preprocessing, on each record alone."""

    pool: Count | None = Field(None, description="Average the maps to this many places a side; left out, keep them.")
    groups: Count | None = Field(
        None, description="Cut each record's channels into this many groups and give each mean 0 and variance 1."
    )


class ScatteringFeatures(Extractor):
    """A wavelet scattering transform to order 2, without weights or data."""

    kind: Literal["scattering"] = "scattering"
    scales: Annotated[int, Field(ge=1, le=4)] = Field(2, description="J: the grid has side / 2^J places a side.")
    orientations: Annotated[int, Field(ge=1, le=16)] = Field(8, description="L: directions of the wavelets.")


class PretrainedFeatures(Extractor):
    """A network that another recipe trained on public data, without its last layer."""

    kind: Literal["pretrained"] = "pretrained"
    result: str = Field(
        description="Its result directory (save_model: true), relative to the recipe.",
        examples=["results/public-net-1a2b3c4d"],
    )
    public: bool = Field(
        False, description="true declares that the data it was trained on are public.", examples=[True]
    )

    @model_validator(mode="after")
    def _public(self) -> PretrainedFeatures:
        if not self.public:
            raise ValueError(
                f"a network trained on private data is no free extractor; public: true declares that those of"
                f" {self.result} are public"
            )
        return self


class Declared(Extractor):
    """An extractor whose numbers come from outside, which the recipe declares public."""

    public: bool = Field(description="Must be written as true: no private record shaped its numbers.")

    @model_validator(mode="after")
    def _declared(self) -> Declared:
        if not self.public:
            raise ValueError("public: a network that private records shaped is no free extractor; true declares none")
        return self


class HuggingFaceFeatures(Declared):
    """A frozen model of transformers in a local folder: the mean of its last hidden states over places that count."""

    kind: Literal["huggingface"] = "huggingface"
    folder: str = Field(
        description="Folder that save_pretrained wrote, relative to the recipe; never downloaded.",
        examples=["models/minilm"],
    )


Features = Annotated[ScatteringFeatures | PretrainedFeatures | HuggingFaceFeatures, Field(discriminator="kind")]
