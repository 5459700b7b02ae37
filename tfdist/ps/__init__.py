"""Parameter server strategy: the code that only a ps job needs.

Only a ps job imports this package. Every task needs the modules of the first group. The chief needs
both groups.

    strategy      TensorFlow's strategy over the connected workers, and the placement of variables
    connections   the connected workers, which may exit and return, and the loop of a server task
    split         a variable split into parts on several servers

    engine        dispatches ranges of steps, runs a work unit on a worker, and
                  adds up the results, including metrics and staleness
    worker_pool   sends each work unit to a free live worker, within the staleness bound
    messages      reduces the messages between a worker and the servers
    keras_compat  the workarounds for Keras that only these steps need
"""
