"""What each algorithm learns: recipe x presets x seeds, all from one model. `python -m benchmarks.learning`.

start.py      the recipe's warm start, once ──► OUT/start/hf
__main__.py   each preset and seed in a process of its own ──► OUT/runs/PRESET-SEED, a line of OUT/rows.jsonl
results.py    lines ──► the tables of docs/algorithms.md (pure)
student.py    intervals of paired differences (pure)
"""
