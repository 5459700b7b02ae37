"""Jobs of several sizes: ``python -m benchmarks.scaling``.

measure  a job of each size through the launcher, repeated, as one table
plot     all of it as a PNG
"""
