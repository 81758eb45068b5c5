"""Lets the `appliance` command be run as `python -m appliance.cli`."""

import sys

from appliance.cli import main

sys.exit(main())
