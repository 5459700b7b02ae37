from tfdist.configs import base


def get_config():
    config = base()
    config.strategy = "single"
    config.devices_per_worker = 2
    return config
