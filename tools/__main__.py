"""`python -m nexuskv.tools` is the `nexuskv` command, wherever scripts are installed."""

import sys

from nexuskv.tools.cli import main

sys.exit(main())
