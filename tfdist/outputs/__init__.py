"""Outputs of a run: its files, its plot, and what it shows on a terminal.

Imports `tfdist.errors` alone, so that training may call it and a reader of a finished run needs
no TensorFlow.
"""
