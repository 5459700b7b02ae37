from tfdist.configs import base


def get_config():
    config = base()
    config.strategy = "ps"
    config.model = "resnet20"
    return config
