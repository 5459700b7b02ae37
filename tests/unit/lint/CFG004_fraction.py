from tfdist.configs import base


def get_config():
    config = base()
    config.checkpoints = 2.5
    return config
