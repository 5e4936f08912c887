"""``python -m dcp_inductor``."""

import sys

from dcp_inductor.cli import main

sys.exit(main())
