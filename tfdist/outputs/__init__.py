"""Outputs of a run: its files, and its output on a terminal.

    run_directory  reader and writer of the files of a run and of its evaluator
    display        progress and result as text, scalars for TensorBoard

Imports only `tfdist.errors` and `tfdist.files`. Training can import it, and readers of a finished
run need no TensorFlow.
"""
