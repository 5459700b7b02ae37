from tfdist.configs import base


def get_config():
    config = base()
    config.global_batch_size = "128"
    return config
