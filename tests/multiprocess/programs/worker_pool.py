"""One task of a ps job; the chief hands out pieces and does as its standard input says."""

import functools
import sys
import time

import tensorflow as tf

import tfdist
from tfdist.ps.workers import worker_pool_of

LENGTH = 10


def main() -> None:
    strategy = tfdist.make_strategy()
    with strategy.scope():
        total = tf.Variable(0, dtype=tf.int64)
        values = tf.lookup.KeyValueTensorInitializer(["one"], tf.constant([1], tf.int64))
        table = tf.lookup.StaticHashTable(values, 0)
    pool = worker_pool_of(strategy, patience_s=8)

    @tf.function
    def work(first, last):
        def body(i):
            total.assign_add(table.lookup(tf.constant("one")))
            return i + 1

        return tf.while_loop(lambda i: i < last, body, [first])[0] - first

    def piece(first, place):
        bounds = tf.constant(first, tf.int64), tf.constant(first + LENGTH, tf.int64)
        return int(work(*bounds))

    for line in sys.stdin:
        seconds = float(line)
        before = {i: share.units for i, share in pool.shares.items()}
        waiting, asked = [], 0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            waiting.append(pool.submit(functools.partial(piece, asked)))
            asked += LENGTH
            if len(waiting) > 4:
                assert waiting.pop(0).result(timeout=300).value == LENGTH
        assert all(future.result(timeout=300).value == LENGTH for future in waiting)
        done = {i: share.units - before[i] for i, share in pool.shares.items()}
        losses = sum(share.losses for share in pool.shares.values())
        print("did", asked, int(total), losses, *done.values(), flush=True)
        total.assign(0)


main()
