"""The benchmarks are a package of the checkout, not of the library."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
