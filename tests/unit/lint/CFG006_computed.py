from tfdist.configs import base


def get_config():
    config = base()
    for rate in (0.1, 0.01, 0.0):
        config.learning_rate = rate
    return config
