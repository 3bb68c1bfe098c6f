"""What a client did: per operation its count, rows, bytes and latency. Pure; the records of several clients merge.

plane.usage() ──► {"put": OperationUsage, ...} ──┐
                                                 ├── merge ──► flatten ──► {"data_plane/put/p99_s": 0.012, ...}
other.usage() ──► ...                          ──┘
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

_GROWTH = 1.05  # width of a bucket: a percentile is off by at most 2.5 %
_LEAST_S = 1e-7


@dataclass
class OperationUsage:
    """All calls of one operation.

    Attributes:
        count: calls that succeeded.
        errors: calls that raised.
        rows: samples written, read, claimed or cleared.
        bytes: payload of the columns written or read, without framing.
        latencies: calls that succeeded, by the seconds for which the caller waited: bucket i has 1.05**i <= seconds < 1.05**(i+1).
    """

    count: int = 0
    errors: int = 0
    rows: int = 0
    bytes: int = 0
    latencies: Counter[int] = field(default_factory=Counter)

    def add(self, rows: int, payload: int, seconds: float) -> None:
        """Count one call that succeeded; less than 100 ns counts as 100 ns."""
        self.count, self.rows, self.bytes = self.count + 1, self.rows + rows, self.bytes + payload
        self.latencies[math.floor(math.log(max(seconds, _LEAST_S), _GROWTH))] += 1

    def quantile(self, q: float) -> float:
        """The nearest-rank q-quantile (0 < q <= 1) of the latencies in seconds, as its bucket's geometric middle; 0.0 of nothing."""
        rank, passed = math.ceil(q * self.latencies.total()), 0
        for bucket in sorted(self.latencies):
            passed += self.latencies[bucket]
            if passed >= rank:
                return math.exp((bucket + 0.5) * math.log(_GROWTH))
        return 0.0


def merge(parts: Iterable[Mapping[str, OperationUsage]]) -> dict[str, OperationUsage]:
    """One record for several clients: counts add up, percentiles are those of all calls together."""
    merged: dict[str, OperationUsage] = {}
    for part in parts:
        for name, usage in part.items():
            whole = merged.setdefault(name, OperationUsage())
            for count in fields(usage):
                setattr(whole, count.name, getattr(whole, count.name) + getattr(usage, count.name))
    return merged


def flatten(usage: Mapping[str, OperationUsage]) -> dict[str, float]:
    """Flat names: data_plane/<operation>/{count,errors,rows,bytes,p50_s,p99_s}."""
    flat: dict[str, float] = {}
    for name, record in usage.items():
        flat |= {f"data_plane/{name}/{what}": float(getattr(record, what)) for what in ("count", "errors", "rows", "bytes")}
        flat |= {f"data_plane/{name}/p{q}_s": record.quantile(q / 100) for q in (50, 99)}
    return flat
