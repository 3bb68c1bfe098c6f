"""New weights from the policy into running engines: one class per transport, with both its ends."""
