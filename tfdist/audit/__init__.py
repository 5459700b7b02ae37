"""Audit of a finished run: ledger and replay.

The ledger says which examples each step consumed; these load no TensorFlow but for `recorder`.

    recorder  writes them down, from the tensors of the step itself
    ledger    what is written, read again whatever the end of its writer, and put together; and the
              proof that each example of each pass was consumed once, or what was not

    replay    one step of a run of `tfdist.train` again
"""
