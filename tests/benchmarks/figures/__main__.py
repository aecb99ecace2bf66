"""Prints each figure of a document that is not what its JSON says, or that has none.

python -m tests.benchmarks.figures
"""

import sys

from tests.benchmarks.figures.claims import claims
from tests.benchmarks.figures.documents import pages, supported_texts, unsupported

wrong = [f"{claim.page}: should have: {text}" for claim in claims() for text in claim.missing()]
wrong += [found for page in pages() for found in unsupported(page, supported_texts(page))]
print("\n".join(wrong))
sys.exit(1 if wrong else 0)
