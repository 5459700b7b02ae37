from tfdist.configs import base


def get_config():
    config = base()
    config.backup_every_steps = 100_000
    return config
