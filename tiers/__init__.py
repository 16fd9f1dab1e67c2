"""Where pages rest: capacity, slots and their headers. Knows no prefixes."""
