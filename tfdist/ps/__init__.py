"""Parameter server strategy: everything that only a ps job has.

A ps job alone imports it: `make_strategy`, and where an engine is made. Every task needs the
modules of the first group, the chief those of both.

    strategy      TensorFlow's strategy, over the workers that are there; where a variable is made
    members       which workers these are, as they come, die and return; what a server task does
    split         a variable in parts on several servers

    engine        ranges of steps are dispatched; what a work unit of them runs on a worker; and
                  what comes back, metrics and staleness too, is added up
    workers       the pool: work units, each to a worker that is free and alive, as stale as allowed
    messages      what crosses between a worker and the servers: few messages
    keras_compat  the workarounds for Keras that only these steps need
"""
