"""`python -m mopdctl.world.family`; see `run`."""

import sys

from mopdctl.train.runtime import prepare_runtime
from mopdctl.world.family.run import main

if __name__ == "__main__":
    prepare_runtime()
    sys.exit(main())
