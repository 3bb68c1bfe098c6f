"""New weights on their way from the policy into running engines."""
