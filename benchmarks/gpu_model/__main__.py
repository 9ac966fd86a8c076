"""`python -m benchmarks.gpu_model`: the census of one configuration."""

import sys

from benchmarks.gpu_model import census

if __name__ == "__main__":
    sys.exit(census.main())
