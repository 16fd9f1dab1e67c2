"""Moving page bytes, with checksums. Knows neither prefixes nor tiers."""
