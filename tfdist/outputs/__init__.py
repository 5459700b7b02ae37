"""Outputs of a run: its files, its plot, and what it shows on a terminal.

    run_directory  files of a run and of its evaluator, each read and written here alone
    terminal       progress and result, as text; scalars and a profile for TensorBoard
    plot           loss and metrics, as a picture

Imports `tfdist.errors` and `tfdist.files` alone, so that training may call it and a reader of a
finished run needs no TensorFlow.
"""
