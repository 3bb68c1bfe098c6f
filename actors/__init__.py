"""What stays alive between steps: Ray actors and everything that runs inside them."""
