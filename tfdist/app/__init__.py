"""App of `tfdist.train`: trains a built-in model on a built-in dataset from a configuration.

The configurations are defined in `tfdist.configs`, which does not import TensorFlow.

    run     a run from a checked configuration to its summary, and its progress reports
    recipe  data, length, learning rate, optimizer and model of a configuration
"""
