def get_config():
    return {"dataset": "mnist"}
