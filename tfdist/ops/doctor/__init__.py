"""Preflight checks of a job's hosts before it is started on them.

Every host gathers facts of itself and of the others (`probes`); one of them has all, and judges
them (`checks`). `examine` runs it, and `servers` tries what TensorFlow's own servers carry.
"""
