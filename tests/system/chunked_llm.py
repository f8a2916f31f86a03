"""`python -m tests.system.chunked_llm FLAGS`: the LLM service, which takes all features in chunks.

Embeddings travel in chunks above a size that no test can afford; here above no size. All else is
the service's own.
"""

import sys

from chiasm.rpc import limits

# Before the service reads it.
limits.STREAMED_ABOVE_BYTES = 0

from llm_service.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
