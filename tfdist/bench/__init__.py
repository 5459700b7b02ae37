"""Measurements of whole jobs, each through the launcher: ``python -m tfdist.bench scaling``.

shapes     which jobs: workers and parameter servers
jobs       one job, and what its run directory says of it
scaling    all of them, repeated, as one table
picture    the table as a PNG
"""
