"""`python -m loop_recipes` is `loop`."""

import sys

from loop_recipes.cli import main

sys.exit(main())
