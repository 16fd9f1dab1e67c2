"""The control plane: one process that joins the index and the tiers and touches no page bytes."""
