"""`python -m tokenmill`."""

from __future__ import annotations

import sys

from tokenmill.cli import main

if __name__ == "__main__":
    sys.exit(main())
