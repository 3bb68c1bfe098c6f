"""Run first-run.ipynb and keep what it shows: python docs/notebook/run.py (needs nbclient and ipykernel; about three minutes on two cores).

The run's files go into a temporary directory, whose path is left out of what is kept.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

NOTEBOOK = Path(__file__).parent / "first-run.ipynb"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="notebook") as directory:
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        # The kernel listens on no port.
        manager = Config(AsyncKernelManager={"transport": "ipc", "ip": f"{directory}/kernel"})
        NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": directory}}, config=manager).execute()
        here = re.compile(re.escape(str(Path(directory).resolve())) + "/?")
        for cell in notebook.cells:
            cell.metadata.clear()
            if "outputs" in cell:
                kept = [output for output in cell.outputs if output.get("name") != "stderr"]  # warnings about this machine's environment
                cell.outputs = [_without(output, here) for output in kept]
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(notebook, NOTEBOOK)


def _without(value: Any, path: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return path.sub("", value)
    if isinstance(value, dict):
        return type(value)({name: _without(inner, path) for name, inner in value.items()})
    return [_without(inner, path) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
