"""``python -m examples.mla_lm``: see cli.py."""

import sys

from examples.mla_lm.cli import main

sys.exit(main())
