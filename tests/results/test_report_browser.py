"""The report in a real browser without a screen: it renders offline, without a script of its own.

It skips where chromium is not installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpsgd_cli.main import main

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
# Run in the page: say what can be seen.
PROBE = """
<script>
const seen = [...document.images].filter(image => image.complete && image.naturalWidth > 100).length;
const rows = document.querySelectorAll("tbody tr").length;
const told = {seen, rows, errors: window.errors};
document.body.insertAdjacentHTML("beforeend", "<pre id=probe>" + JSON.stringify(told) + "</pre>");
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt install chromium)")
def test_the_report_works_in_a_browser(tmp_path: Path) -> None:
    assert BROWSER is not None, "chromium is not installed"
    report = tmp_path / "page.html"
    fast = ["epochs=2", "repeats=2"]
    arguments = ["quickstart", *fast, "--epsilon", "1,3,2", "--out", str(tmp_path), "--report", str(report)]
    assert CliRunner().invoke(main, ["compare", *arguments]).exit_code == 0
    probed = tmp_path / "probed.html"
    catch = "<head><script>window.errors = []; window.onerror = text => { errors.push(text); };</script>"
    probed.write_text(report.read_text().replace("<head>", catch).replace("</body>", PROBE))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", probed.as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="probe">(.*?)</pre>', page)
    assert found is not None, page[-2000:]
    told = json.loads(found[1])
    assert told == {"seen": 4, "rows": 3, "errors": []}
    assert "<script" not in report.read_text()
