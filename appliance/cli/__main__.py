"""Runs the `appliance` command as `python -m appliance.cli`."""

import sys

from appliance.cli import main

sys.exit(main())
