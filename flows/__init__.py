"""What happens and in which order: Prefect flows, short enough to read aloud."""

from configs import settings

settings.apply_defaults()  # before prefect or ray is imported anywhere below
