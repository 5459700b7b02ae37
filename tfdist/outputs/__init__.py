"""What a run writes into its run directory and shows on the way: files, plot, table, progress.

Imports `tfdist.errors` alone, so that training may call it and a reader of a finished run needs
no TensorFlow.
"""
