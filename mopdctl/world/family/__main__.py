"""`python -m mopdctl.world.family`; see `run`."""

import sys

from mopdctl.train.runtime import prepare_runtime, settle_libraries
from mopdctl.world.family.run import main

if __name__ == "__main__":
    prepare_runtime()
    settle_libraries()
    sys.exit(main())
