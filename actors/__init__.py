"""What stays alive between steps: Ray actors and everything that runs inside them."""

from configs import settings

settings.apply_defaults()  # before ray, vllm or transformers is imported anywhere below
