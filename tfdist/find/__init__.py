"""Finders: what to set before a run, by trying it out or by looking at the model.

learning_rate  a range test under every strategy, and what its losses suggest
memory         memory of a training by its parts, from the graph of a step
batch_size     the largest batch that fits, tried in child processes; no TensorFlow
subject        model and data of a configuration, or of ``file.py:function``
split_trial    the program of the jobs of ``tfdist.bench pipeline``
"""
