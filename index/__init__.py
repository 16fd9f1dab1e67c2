"""The radix prefix index: prefix → pages, leases, eviction order. Pure: no I/O, no clock."""
