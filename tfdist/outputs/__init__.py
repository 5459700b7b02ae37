"""Outputs of a run: files of the run directory, plot, table, progress.

Imports `tfdist.errors` alone, so that training may call it and a reader of a finished run needs
no TensorFlow.
"""
