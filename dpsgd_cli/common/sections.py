"""Base class of the sections of a recipe, and the types that they share."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dpsgd_cli.common.text_format import quoted

_MOST = 1_000_000_000

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Auto = Literal["auto"]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Delta = Fraction

DrawSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""Seed of a NumPy generator."""


TO_FILL_IN = ("LOW", "HIGH")
"""Placeholders that `dpsgd recipe new` writes for bounds that only the user knows."""
WHOSE = "WHOSE"
"""First entry of the list that `dpsgd recipe new` writes for `privacy.unit`, before the columns that it may be."""


def composed(name: str) -> str:
    """Return the name of a column in Unicode's normal form C, as tables are read; a file's name as it is."""
    return name if name.endswith(".npy") else unicodedata.normalize("NFC", name)


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if not pair[0] < pair[1]:
        raise ValueError(f"is {list(pair)}, but must be [low, high] with low < high")
    return pair


def _distinct(values: list[Any]) -> list[Any]:
    twice = next((value for index, value in enumerate(values) if str(value) in map(str, values[:index])), None)
    if twice is not None or not values:
        raise ValueError(f"lists {twice!r} twice" if values else "is empty")
    return values


def _countable(number: int) -> int:
    if number > _MOST:
        raise ValueError(f"is {quoted(number)}, but must be at most {_MOST}")
    return number


Name = Annotated[str, AfterValidator(composed)]
Count = Annotated[int, Field(ge=1), AfterValidator(_countable)]
Interval = Annotated[tuple[float, float], AfterValidator(_ascending)]
Values = Annotated[list[Any], AfterValidator(_distinct)]


class Section(BaseModel):
    """A section of a recipe. Unknown keys are errors, and instances are immutable.

    A validator's message has one line per problem; a line that begins with `key.path: ` is reported at that key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def changed(self, **values: Any) -> Self:
        """Return a validated copy with other `values` of some fields; pydantic's ValidationError for what is refused.

        Fields left out stay left out, and private attributes are kept.
        """
        made = self.model_validate({name: getattr(self, name) for name in self.model_fields_set} | values)
        if self.__pydantic_private__ is not None:
            made.__pydantic_private__ = dict(self.__pydantic_private__)
        return made

    must_state: ClassVar[tuple[str, ...]] = ()
    """Class attributes that each kind below this class must state in its own body: the guarantee depends on them."""

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        """Raise TypeError for a kind that does not state an attribute of `must_state` in its own body.

        A kind is a class whose field `kind` has a default.
        """
        super().__pydantic_init_subclass__(**arguments)
        left_out = [name for name in cls.must_state if name not in vars(cls)]
        if left_out and "kind" in cls.model_fields and not cls.model_fields["kind"].is_required():
            raise TypeError(
                f"kind {cls.model_fields['kind'].default!r} must state {', '.join(left_out)}: none has a default"
            )
