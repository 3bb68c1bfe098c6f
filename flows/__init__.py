"""What happens and in which order: Prefect flows, short enough to read aloud."""
