"""What a run leaves behind, and what a person sees of it: files, report, plots, terminal. Imports neither Prefect nor Ray nor actors."""
