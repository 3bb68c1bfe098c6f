"""One Prefect task per step of a flow: find the named actors, call them, return metadata."""

from configs import settings

settings.apply_defaults()  # before prefect or ray is imported anywhere below
