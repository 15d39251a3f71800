"""`python -m tests.server.batch_fakes IN OUT [flags]`: run-batch over fake processes."""

from __future__ import annotations

import sys
from functools import partial

from tests.server.fakes import plan_fakes
from tokenmill import cli
from tokenmill.server import batch

if __name__ == "__main__":
    batch.run_batch = partial(batch.run_batch, planner=plan_fakes)
    sys.exit(cli.main(["run-batch", *sys.argv[1:]]))
