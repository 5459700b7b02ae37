from tfdist.configs import base


def get_config():
    config = base()
    config.dropout = 1.0
    return config
