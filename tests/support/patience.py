"""How long a test waits for something that happens soon, even on one busy core. What takes longer hangs.

No test may depend on how long anything takes: it waits for what it needs, and this is only where that ends.
"""

PATIENCE = 1200.0  # seconds
