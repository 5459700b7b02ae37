"""Training under every strategy: `fit`, `evaluate`, `predict`, and the engine below them.

The package imports none of its modules, so a program can import `epochs` without the others.
"""
