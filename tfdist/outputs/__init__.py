"""Outputs of a run: its files, its plot, and what it shows on a terminal.

    run_directory  files of a run and of its evaluator, each read and written here alone
    tensorboard    scalars and a profile for TensorBoard
    terminal       progress and result, as text
    plot           loss and metrics, as a picture
    digest         hashes of the weights and of the whole state

Imports `tfdist.errors` and `tfdist.files` alone, so that training may call it and a reader of a
finished run needs no TensorFlow.
"""
