from tfdist.configs import base


def get_config():
    config = base()
    config.validation_split = ""
    config.early_stopping_patience = 3
    return config
