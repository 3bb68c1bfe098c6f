"""One runnable module per number that we publish: `.venv/bin/python -m benchmarks.NAME` ends with one JSON line."""
