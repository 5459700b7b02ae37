from tfdist.configs import base


def get_config():
    config = base()
    config.optimizer = "Adam"
    return config
