"""Serving: a trained model as a verified SavedModel in a version directory.

export     from a model in memory to a version that has been checked and published
sources    from a `.keras` file, a run directory or checkpoints to a model in memory
"""
