from tfdist.configs import base


def get_config():
    config = base()
    config.model = "resnet-20"
    return config
