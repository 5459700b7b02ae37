from tfdist.configs import base


def get_config():
    config = base()
    if True:
        config.global_batch_size = -1
    return config
