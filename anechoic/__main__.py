"""python -m anechoic: the same as the command."""

import sys

from anechoic.cli import main

sys.exit(main())
