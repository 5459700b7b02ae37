from tfdist.configs import base


def get_config():
    config = base()
    config.global_batchsize = 128
    return config
