"""Outputs of a run: its files.

    run_directory  reader and writer of the files of a run and of its evaluator
    scalars        scalars for TensorBoard
    sweep_journal  journal of a sweep

Imports only `tfdist.errors` and `tfdist.files`. Training can import it, and readers of a finished
run need no TensorFlow.
"""
