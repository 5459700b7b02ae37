from tfdist.configs import base


def get_config():
    config = base()
    config.augmentation.mean = ("0.5",)
    return config
