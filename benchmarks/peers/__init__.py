"""TRL's GRPO beside this project's, on the same GPU, in turns. `python -m benchmarks.peers`; TRL is an optional requirement (`.[peers]`).

jobs.py      what runs, in which order, and what of it is still missing (pure)
trl_side.py  one job of TRL's, in a process of its own
__main__.py  runs the jobs of both sides, a line of OUT/results.jsonl each
results.py   lines ──► the tables of docs/gpu.md (pure)
"""
