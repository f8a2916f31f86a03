"""`python -m deploy.images lock` and `python -m deploy.images build`."""

import sys

from deploy.images.build import main

sys.exit(main(sys.argv[1:]))
