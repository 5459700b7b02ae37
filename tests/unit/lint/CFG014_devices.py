from tfdist.configs import base


def get_config():
    config = base()
    config.devices_per_worker = 8
    config.global_batch_size = 4
    return config
