from tfdist.configs import base


def get_config():
    config = base()
    config.dropout = 0.1
    config.model = "cnn"
    config.dropout = 0.2
    return config
