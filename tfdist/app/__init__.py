"""App of `tfdist.train`: a built-in model on a built-in dataset, by a configuration.

The configurations themselves are in `tfdist.configs`, which loads no TensorFlow.

    run     from a checked configuration to the summary of the run, and what is shown meanwhile
    recipe  data, length, learning rate, optimizer and model of a configuration
"""
