"""python -m anechoic: the same as the command."""

import sys

from anechoic.cli.main import main

sys.exit(main())
