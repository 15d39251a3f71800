"""`python -m tests.server.serve_fakes MODEL [flags]`: the real server over fake processes."""

from __future__ import annotations

import sys

from tests.server.fakes import plan_fakes
from tokenmill.errors import TokenmillError
from tokenmill.flags import ServeFlags, parse
from tokenmill.server.launch import serve

if __name__ == "__main__":
    flags = parse(ServeFlags, "serve", sys.argv[1:])
    try:
        sys.exit(serve(flags.run, flags.server, plan_fakes))
    except TokenmillError as error:
        print(f"tokenmill: {error.message}", file=sys.stderr)
        sys.exit(2)
