"""Outputs of a run: its files, its plot, and what it shows on a terminal.

    run_directory  files of a run and of its evaluator, each read and written here alone
    display        progress, result and costs as text, scalars and a profile for TensorBoard, a plot

Imports `tfdist.errors` and `tfdist.files` alone, so that training may call it and a reader of a
finished run needs no TensorFlow.
"""
