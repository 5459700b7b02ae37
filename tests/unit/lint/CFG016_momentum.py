from tfdist.configs import base


def get_config():
    config = base()
    config.momentum = 0.8
    return config
