"""Preflight checks of a job's hosts before it is started on them.

Every host gathers facts of itself and of the others; one of them has all, and judges. The checks of
`host_checks` and `network_checks` are functions of the facts and of nothing else.
"""
