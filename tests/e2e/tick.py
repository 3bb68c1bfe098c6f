"""A flow that does nothing, for the test that a schedule fires."""

from prefect import flow


@flow
def tick() -> None:
    """Nothing."""
