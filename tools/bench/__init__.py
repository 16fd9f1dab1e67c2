"""Benchmarks, each reached as `nexuskv bench TOPIC`; each measures beside its limit."""
