"""The tables of docs/coming-from.md. `python -m tests.configs.names_page` writes them anew."""

from __future__ import annotations

from configs.other_names import PROJECTS
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "coming-from.md"
FIRST = "\n### TRL\n"


def tables() -> str:
    """One for each project, under a heading."""
    parts = []
    for project, names in PROJECTS.items():
        lines = [
            f"| `{name}` | {' or '.join(f'`{field}`' for field in ours.fields) or 'none'} | {ours.note} |" for name, ours in names.items()
        ]
        parts.append("\n".join((f"\n### {project}\n", "| there | here | what differs |", "|---|---|---|", *lines, "")))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(FIRST)[0] + tables())
