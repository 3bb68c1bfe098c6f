"""Fetches a model's files from a hub of Hugging Face into its cache: the one program of a run that may ask the hub.

python -m actors.models.hub ID REVISION PATTERN ...      prints {"path": ...} or {"error": ..., "kind": ...}
"""

from __future__ import annotations

import json
import sys

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

# Other formats in subfolders (onnx/, original/), and a second copy in the format of the model's makers.
IGNORED = ("*/*", "consolidated*")


def main(name: str, revision: str, patterns: list[str]) -> dict[str, str]:
    """Where the snapshot is, or what went wrong."""
    try:
        return {"path": snapshot_download(name, revision=revision or None, allow_patterns=patterns, ignore_patterns=list(IGNORED))}
    except GatedRepoError as error:
        return {"kind": "gated", "error": str(error)}
    except RevisionNotFoundError as error:
        return {"kind": "revision", "error": str(error)}
    except RepositoryNotFoundError as error:
        return {"kind": "unknown", "error": str(error)}
    except LocalEntryNotFoundError as error:
        cause = error.__cause__ or error
        return {"kind": "unreachable", "error": f"{type(cause).__name__}: {cause}"}
    except Exception as error:  # noqa: BLE001  (the parent says it in one line)
        return {"kind": "other", "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3:])))
