"""One file a group of commands; each lists its `Command` records, `tools/cli.py` joins them."""
