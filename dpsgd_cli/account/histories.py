"""Cases made of events of dp_accounting or of an Opacus history (`accounting/events.py`): what others recorded."""

from __future__ import annotations

from dataclasses import dataclass

from dpsgd_cli.account.cases import Case
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.results.guarantee import ASSUMED


@dataclass(frozen=True)
class HistoryCase(Case):
    """Releases of one training that another library recorded; `remark` says what the record cannot vouch for."""

    label: str
    releases: tuple[Release, ...]
    delta: float
    remark: str
    together: int | None = None

    assumed = ASSUMED

    @property
    def described(self) -> str:  # type: ignore[override]
        """Description of the record."""
        uses = sum(release.count for release in self.releases)
        return f"{self.label}: {count(uses, 'release')} of {count(len(self.releases), 'kind')}, delta {self.delta:g}"

    @property
    def batching(self) -> str:  # type: ignore[override]
        """Batchings of all Gaussian sums, joined by +."""
        sums = (release.mechanism for release in self.releases)
        return "+".join(sorted({one.batching for one in sums if isinstance(one, GaussianSum)})) or "full"

    def each_trial(self) -> list[list[list[Release]]]:
        return [[list(self.releases)]]

    def each_curve(self) -> list[list[list[Release]]]:
        raise UnsupportedMechanism(f"{self.label} has no epochs, so no curve by epoch")

    def own_remarks(self) -> list[str]:
        return [f"{self.label}: {self.remark}"]
