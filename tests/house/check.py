"""Checks the house rules: `python -m tests.house.check` prints each violation and exits with 1 if any is
found.

With `--counts` it prints how many there are for each folder and rule.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.house import documents, imports, naming, sizes, wording
from tests.house.source import House, Violation, read_house

ROOT = Path(__file__).resolve().parents[2]
RULES: tuple[Callable[[House], Iterator[Violation]], ...] = (
    sizes.folder_size,
    sizes.services_top,
    sizes.module_length,
    sizes.function_length,
    sizes.short_module,
    imports.sibling_type_checking,
    imports.import_cycle,
    imports.process_door,
    naming.duplicate_class,
    naming.name_of_test,
    naming.docstring_of_test,
    naming.place_of_test,
    wording.docstring_opening,
    wording.literary_word,
    wording.evasion,
    wording.of_name,
    wording.class_clause,
    documents.document_path,
    documents.docstring_path,
    documents.document_name,
    documents.document_number,
    documents.document_default,
    documents.document_length,
    documents.document_width,
)


def violations(house: House) -> list[Violation]:
    """Return all violations of all rules, each once, by path and line."""
    found = {violation for rule in RULES for violation in rule(house)}
    return sorted(found, key=lambda violation: (violation.path, violation.line, str(violation)))


def main(arguments: list[str]) -> int:
    """Print the violations, or their counts, and return the exit code."""
    found = violations(read_house(ROOT))
    if "--counts" in arguments:
        counts = Counter((violation.path.rpartition("/")[0] or ".", violation.rule) for violation in found)
        for (folder, rule), count in sorted(counts.items()):
            print(f"{count:4} {folder} {rule}")
    else:
        for violation in found:
            print(violation)
    if found:
        print(f"{len(found)} violations of the house rules (tests/house/)", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
