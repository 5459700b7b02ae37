from tfdist.configs import base


def get_config():
    config = base()
    config.profile_steps = (120, 100)
    return config
