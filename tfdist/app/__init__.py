"""App of `tfdist.train`: a built-in model on a built-in dataset, by a configuration.

The configurations themselves are in `tfdist.configs`, which loads no TensorFlow.

    run        from a checked configuration to the summary of the run
    recipe     data, length, learning rate, optimizer and model of a configuration
    models     the networks that it can name
    reporter   what is shown and logged while the run goes on
"""
