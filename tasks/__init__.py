"""One Prefect task per step of a flow: find the named actors, call them, return metadata."""
