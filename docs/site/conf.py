"""The documentation as a site: `make docs`. Its pages: docs/*.md as they stand, README.md, and what configuration.py makes."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent
sys.path[:0] = [str(HERE), str(DOCS.parent)]

import configuration  # noqa: E402

project, copyright, author = "grpo-flows", "the authors of grpo-flows", "the authors"
extensions = ["myst_parser"]
root_doc, exclude_patterns = "index", ["README.md", "site/**", "kubernetes/**", "automations/**"]
nitpicky, smartquotes = True, False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

html_theme, html_title = "furo", "grpo-flows"
html_show_copyright = html_show_sphinx = False
html_copy_source = False
html_theme_options = {"source_directory": "docs/"}


def _complete(app: object, page: str, source: list[str]) -> None:
    """What a page has on the site alone: the README, the list of pages, and the reference that is made of the classes."""
    if page == "overview":
        source[0] = (DOCS.parent / "README.md").read_text().replace("](docs/", "](")
    if page == "index":
        source[0] += (DOCS / "README.md").read_text().partition("\n")[2]
    if page == "configuration":
        source[0] += configuration.markdown()
    source[0] = source[0].replace("[../README.md](../README.md", "[overview](overview.md").replace("](../README.md", "](overview.md")


def setup(app: object) -> dict[str, bool]:
    app.connect("source-read", _complete)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True}
