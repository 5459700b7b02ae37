"""Audit of a finished run: ledger and replay.

The ledger says which examples each step consumed; these load no TensorFlow but for `recorder`.

    recorder  writes them down, from the tensors of the step itself
    files     what is written, and read again whatever the end of its writer
    merge     the attempts of a run put together, as they follow each other
    proof     that each example of each pass was consumed once, or what was not

    replay    one step of a run of `tfdist.train` again
"""
