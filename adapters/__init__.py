"""Engine hooks. Thin: they translate an engine's calls and identities, nothing more."""
