from tfdist.configs import base


def get_config():
    config = base()
    config.total_examples = 100
    config.checkpoints = 101
    return config
