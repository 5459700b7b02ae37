from tfdist.configs import base


def get_config():
    config = base()
    config.checkpoints = int("ten")
    return config
