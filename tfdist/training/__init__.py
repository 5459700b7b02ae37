"""Training under every strategy: `fit`, `evaluate`, `predict`, and the engine below them.

Importing the package loads none of its modules, so that what needs the epochs alone loads no more.
"""
