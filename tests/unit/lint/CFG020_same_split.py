from tfdist.configs import base


def get_config():
    config = base()
    config.validation_split = "train"
    return config
