"""Jobs of several sizes, and a cost model of them: ``python -m benchmarks.scaling``.

measure      a job of each size through the launcher, repeated, as one table
cost_model   a ps job as a network of queues, a multiworker job as a ring, fitted to measured ones
predictions  how far the models are out on jobs held out, and what they say of others
plot         all of it as a PNG
"""
