"""Measurements of whole jobs, each through the launcher: ``python -m tfdist.bench scaling``.

shapes      which jobs: workers and parameter servers
wire        a network as slow as it is told to be
jobs        one job, and what its run directory says of it
scaling     all of them, repeated, as one table
queueing    a closed network of queues, solved
cost_model  a ps job as such a network, fitted to measured ones
ring        a multiworker job as computing and an all-reduce
judge       which jobs they are fitted to, and how far they are out on the others
outlook     what they say past what was measured, and what to change
picture     all of it as a PNG
"""
