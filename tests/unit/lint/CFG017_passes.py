from tfdist.configs import base


def get_config():
    config = base()
    config.total_examples = 20
    return config
