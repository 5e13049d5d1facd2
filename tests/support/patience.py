"""How long a test waits for something that happens soon, even on one busy core, and how many cases it tries.

No test may depend on how long anything takes: it waits for what it needs, and this is only where that ends.
"""

import os
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 1200.0  # seconds; what takes longer hangs


def many(few: T, long: T) -> T:
    """What a test tries: ``few``, or ``long`` where SPECAR_LONG is set, which may take an hour."""
    return long if os.environ.get("SPECAR_LONG") else few
