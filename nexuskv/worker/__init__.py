"""The data plane: what touches page bytes on behalf of the control plane."""
