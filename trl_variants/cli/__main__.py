"""`accelerate launch -m trl_variants.cli train RECIPE.yaml`: the same command line on several processes."""

import sys

from . import main

sys.exit(main())
