"""Finders: what to set before a run, by trying it out or by looking at the model.

range_test     learning rates and losses of a range test, and what they suggest; no TensorFlow
learning_rate  the range test itself, under every strategy
liveness       most bytes that a graph's tensors take at once; no TensorFlow
memory         memory of a training by its parts, from the graph of a step
batch_size     the largest batch that fits, tried in child processes; no TensorFlow
trial          the child process
subject        model and data of a configuration, or of ``file.py:function``
"""
