"""Prefect's `@flow`, whose call from Python brings a Prefect server where none is configured, as the command line does.

Prefect would start a temporary one, without a UI, and a process that is killed (a notebook's kernel, say) would leave it behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import Flow
from prefect.context import FlowRunContext

from flows.service.pages import reports_server
from flows.service.server import configured_url, prefect_server


class Served[**P, R](Flow[P, R]):
    """A flow as `flow` makes it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Flow`. The server ends with the call, or with this process, however that ends."""
        if FlowRunContext.get() is not None or configured_url() is not None:
            return super().__call__(*args, **kwargs)
        with prefect_server() as url, reports_server():
            print(f"Prefect UI: {url}", flush=True)
            return super().__call__(*args, **kwargs)


def flow[**P, R](**options: Any) -> Callable[[Callable[P, R]], Flow[P, R]]:
    """The decorator. Args: as of `prefect.flow`."""
    return lambda function: Served(function, **options)
