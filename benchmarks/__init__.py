"""One runnable module per number that we publish: `.venv/bin/python -m benchmarks.NAME` ends with one JSON line."""

from configs import settings

settings.apply_defaults()  # before any of them imports ray, which reads the environment then
