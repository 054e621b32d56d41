"""Names of the backends. Apart from the ops, so that a config can be checked without importing torch."""

BACKENDS = ("naive", "solve")
