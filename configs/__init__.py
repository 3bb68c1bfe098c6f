"""What can be set: strict pydantic models, one per component, and the recipes that fill them."""
