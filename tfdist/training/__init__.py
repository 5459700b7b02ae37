"""Training under every strategy: `fit`, `evaluate`, `predict`, and the engine below them.

Importing the package loads none of its modules, so users of only the epochs load no other modules.
"""
