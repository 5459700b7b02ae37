"""Preflight checks of a job's hosts before it is started on them.

Every host gathers facts of itself and of the others; one of them has all, and judges. Gathering is
in the modules here, judging in `checks`: functions of the facts and of nothing else.
"""
