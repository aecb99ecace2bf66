"""Adds the pages beside docs/ to the site, and adapts links; mkdocs.yml names this file as a hook.

README.md is the first page, and results/ a folder. A link to any other file of the source tree becomes plain
text, because the site has no sources; a link to nothing stays, and `mkdocs build --strict` refuses it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
} | {f"results/{path.name}": f"results/{path.name}" for path in sorted((ROOT / "results").iterdir())}
"""File outside docs/ -> its file on the site."""
LINK = re.compile(r"\[([^\]\n]+(?:\n[^\]\n]+)?)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/."""
    for name, uri in BESIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text of a page with its links as the site needs them."""
    uri = page.file.src_uri
    source = {page: name for name, page in BESIDE.items()}.get(uri, f"docs/{uri}")

    def adapt(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (ROOT / path / "README.md").is_file():
            path = f"{path}/README.md"
        inside = BESIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if inside:
            return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(uri) or '.')}{anchor})"
        return text if (ROOT / path).exists() else link[0]

    return LINK.sub(adapt, markdown)
