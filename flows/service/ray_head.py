"""`ray start` as `make up` gives it: the workers of that Ray are forks, as those of a run's own (actors/forks), so each run starts sooner.

python -m flows.service.ray_head PLACE start --head --block ...          PLACE: directory for the fork server's socket and log
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from ray.scripts import scripts

from actors.forks import server
from tasks.cluster import chosen_agent_ports, forked_workers

_LOOK_EVERY_S = 10.0


def main(place: str, *arguments: str) -> None:
    """Returns when Ray has ended."""
    with server.running(Path(place)), forked_workers(), chosen_agent_ports():
        threading.Thread(target=_report_trouble, name="forks", daemon=True).start()
        scripts.cli.main(arguments, prog_name="ray")


def _report_trouble() -> None:
    """Say once, into Ray's log, why workers are no forks any more."""
    while not (why := server.trouble()):
        time.sleep(_LOOK_EVERY_S)
    print(f"workers are no forks from now on: {why}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
