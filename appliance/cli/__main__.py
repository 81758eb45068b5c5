"""`python -m appliance.cli` is the command `appliance`."""

import sys

from appliance.cli import main

sys.exit(main())
