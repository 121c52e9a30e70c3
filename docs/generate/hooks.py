"""Hooks of MkDocs: pages of the repository, pages from the schema and the commands, and links between all of them.

Sources keep links that work where they lie in the repository; here they become links of the site. A link to any other
file of the repository becomes a link to a copy of it.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs may be installed for another environment than the checkout's package

from docs.generate import gallery, reference  # noqa: E402

LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's own pages with what they link to, and the generated pages."""
    for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md"):
        _add(files, config, name)
    for path in sorted(ROOT.glob("results/**/README.md")):
        _add(files, config, path.relative_to(ROOT).as_posix())
    for file in list(files.documentation_pages()):
        place = _place(file)
        for target in _targets(place, (ROOT / place).read_text(encoding="utf-8")):
            if not target.startswith("docs/") and (ROOT / target).is_file() and target not in files.src_uris:
                _add(files, config, target)
    for uri, text in reference.pages().items():
        files.append(File.generated(config, uri, content=text))
    for name in ("iframe-worker.js", "site.css"):
        content = Path(__file__).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"assets/{name}", content=content))
    made = gallery.made(Path(os.environ.get("DPSGD_GALLERY") or ROOT / "build" / "gallery"))
    for uri, exhibit in gallery.pages(made).items():
        files.append(File.generated(config, uri, content=exhibit))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn the links of a page, which are those of the repository, into the site's."""
    place = _place(page.file)
    if not (ROOT / place).is_file():
        return markdown

    def moved(found: re.Match[str]) -> str:
        if "://" in found[2] or found[2].startswith("mailto:"):
            return found[0]
        uri = _uri(posixpath.normpath(posixpath.join(posixpath.dirname(place), found[2])))
        relative = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{found[1]}{relative}{found[3]}"

    return LINK.sub(moved, markdown)


def _place(file: File) -> str:
    """Return the path of a page in the repository."""
    inside = f"docs/{file.src_uri}"
    return inside if (ROOT / inside).is_file() else file.src_uri


def _uri(place: str) -> str:
    """Return the path of a file of the repository in the site."""
    return "index.md" if place == "README.md" else place.removeprefix("docs/")


def _targets(place: str, text: str) -> list[str]:
    links = [found[2] for found in LINK.finditer(text) if "://" not in found[2]]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(place), link)) for link in links]


def _add(files: Files, config: Any, name: str) -> None:
    files.append(File(name, str(ROOT), config.site_dir, use_directory_urls=False))
