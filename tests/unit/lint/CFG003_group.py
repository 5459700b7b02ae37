from tfdist.configs import base


def get_config():
    config = base()
    config.augmentation.random_flips = True
    return config
