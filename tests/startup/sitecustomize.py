"""Python imports this when it starts, where this folder is on PYTHONPATH: it turns Ray's worker processes into forks (tests/zygote.py)."""

import os
import sys

if os.environ.get("TESTS_ZYGOTE") and any(argument.endswith("/setup_worker.py") for argument in sys.orig_argv[1:2]):
    from tests.zygote import launch

    launch(sys.orig_argv[2:], os.environ["TESTS_ZYGOTE"])
