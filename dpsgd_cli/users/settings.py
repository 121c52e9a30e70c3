"""`privacy.unit`: the user as unit of privacy, if users have several rows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dpsgd_cli.common.sections import Name, Section

PERSON = "user"
"""Name of the owner of rows in statements, whatever the column is called."""


class Unit(Section):
    """All rows of one user: neighbouring data sets differ in all of them at once."""

    column: Name = Field(
        description="Whose a row is: a column of the table, an array of the npz file, or a .npy file with an entry for"
        " each row (relative to the recipe; training rows, then those of a test file). It is no feature.",
        min_length=1,
    )
    most_rows: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="A user's gradient is the mean over at most this many of their rows, chosen"
        " independently of their values."
    )

    @property
    def in_a_file(self) -> bool:
        """Return True if `column` names a separate .npy file."""
        return self.column.endswith(".npy")
