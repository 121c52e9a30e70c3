"""The reproduction of Yu et al. 2019: `python -m benchmarks.pages train yu2019`."""

from pathlib import Path

from benchmarks.pages.spec import Spec

SPEC = Spec(Path(__file__).with_name("page.yaml"))
SCHEDULES: list[str] = SPEC.content["lists"]["schedules"]
NON_PRIVATE = [case.name for case in SPEC.cases if case.table == "non-private"]
