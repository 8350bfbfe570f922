"""Examples: each has a ``main()`` and runs as a test."""
