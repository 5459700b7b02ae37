"""What each rule of the linter is for: a file that breaks it and no other, by its name.

A name begins with the rule and ends as the file would. The good files, which are in
``tests/unit/lint``, are what most of the manifests are made of, by one change.
"""

import json
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent / "lint"

WORKERS = {"worker": ["a.example:2222", "b.example:2222"]}
PS = {"chief": ["c.example:2222"], "worker": ["a.example:2222"], "ps": ["p.example:2222"]}
WORKER_0, CHIEF_0 = {"type": "worker", "index": 0}, {"type": "chief", "index": 0}
GOOD = json.dumps({"cluster": WORKERS, "task": WORKER_0})

OF_TEXT = {
    "LNT001_latin_1.json": b'{"cluster": {"worker": ["z\xfcrich:2222"]}}',
    "LNT002_script.env": b"export TFDIST_STRATEGY=nonsense\n",
    "LNT002_table.toml": b'[cluster]\nworker = ["a.example:2222"]\n',
    "TFC001_comma.json": GOOD.replace('"b.example:2222"', "").encode(),
    "TFC001_cut_off.json": GOOD.partition(": {")[0].encode(),
    "TFC002_python_dict.json": GOOD.replace('"', "'").encode(),
    "TFC002_quoted_twice.json": f"'{GOOD}'\n".encode(),
    "TFC003_worker_twice.json": b'{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}',
    "TFC004_deep.json": b"[" * 100_000,
    "TFC004_list.json": b'["a.example:2222", "b.example:2222"]',
    "K8S001_anchor_in_itself.yaml": b"a: &a [*a]\n",
    "K8S001_brackets.yaml": b"kind: [Job\n",
    "K8S001_tabs.yaml": b"apiVersion: v1\nkind: Service\nmetadata:\n\tname: train\n",
}

OF_TF_CONFIG: dict[str, dict[str, object]] = {
    "TFC005_clusters": {"clusters": WORKERS, "task": WORKER_0},
    "TFC005_no_cluster": {"task": WORKER_0},
    "TFC006_no_index": {"cluster": WORKERS, "task": {"type": "worker"}},
    "TFC006_no_task": {"cluster": WORKERS},
    "TFC007_cluster_is_a_list": {"cluster": ["a.example:2222"], "task": WORKER_0},
    "TFC007_options_are_a_number": {"cluster": WORKERS, "task": WORKER_0, "tfdist": 3},
    "TFC008_master": {"cluster": {"master": ["a:2222"], "worker": ["b:2222"]}, "task": WORKER_0},
    "TFC008_wroker": {"cluster": {"wroker": ["a.example:2222"]}, "task": WORKER_0},
    "TFC009_a_string": {"cluster": {"worker": "a.example:2222"}, "task": WORKER_0},
    "TFC009_no_address": {"cluster": {"worker": []}, "task": WORKER_0},
    "TFC013_two_chiefs": {"cluster": {"chief": ["a:2222", "b:2222"]}, "task": CHIEF_0},
    "TFC014_no_chief": {"cluster": {"worker": ["a:2222"], "ps": ["p:2222"]}, "task": WORKER_0},
    "TFC014_no_worker": {"cluster": {"chief": ["a:2222"], "ps": ["p:2222"]}, "task": CHIEF_0},
    "TFC015_wroker": {"cluster": WORKERS, "task": {"type": "wroker", "index": 0}},
    "TFC016_negative": {"cluster": WORKERS, "task": {"type": "worker", "index": -1}},
    "TFC016_quoted": {"cluster": WORKERS, "task": {"type": "worker", "index": "0"}},
    "TFC017_index_2": {"cluster": WORKERS, "task": {"type": "worker", "index": 2}},
    "TFC017_no_ps": {"cluster": WORKERS, "task": {"type": "ps", "index": 0}},
    "TFC021_tf_dist": {"cluster": WORKERS, "task": WORKER_0, "tf_dist": {"strategy": "ps"}},
}

# Of the first of two workers.
OF_ADDRESS = {
    "TFC010_no_port": "a.example",
    "TFC011_port_0": "a.example:0",
    "TFC012_same_address": "b.example:2222",
    "TFC022_any": "0.0.0.0:2222",
    "TFC022_localhost": "localhost:2222",
    "TFC023_outgoing": "a.example:40000",
    "TFC024_low": "a.example:80",
}

OF_OPTIONS: dict[str, tuple[dict[str, list[str]], dict[str, object]]] = {
    "TFC018_misspelt": (WORKERS, {"startup_timeout": 60}),
    "TFC019_quoted": (WORKERS, {"startup_timeout_s": "60"}),
    "TFC019_strategy": (WORKERS, {"strategy": "mutliworker"}),
    "TFC020_multiworker_with_ps": (PS, {"strategy": "multiworker"}),
    "TFC020_ps_without_ps": (WORKERS, {"strategy": "ps"}),
    "TFC020_stages": (WORKERS, {"strategy": "pipeline", "stages": 3}),
    "TFC025_more_than_there_are": (PS, {"min_workers": 2}),
    "TFC025_without_ps": (WORKERS, {"min_workers": 1}),
}

HOSTS = ("TFDIST_HOSTS=a,b", "TFDIST_NODE_RANK=0")
OF_ENVIRON = {
    "ENV001_cluster": ("TFDIST_CLUSTER=kubernetis",),
    "ENV001_ps": ("TFDIST_PS=many",),
    "ENV001_stages": (*HOSTS, "TFDIST_STAGES=2"),
    "ENV001_strategy": ("TFDIST_STRATEGY=multi-worker",),
    "ENV002_strategie": ("TFDIST_STRATEGIE=ps",),
    "ENV003_ports": ("TFDIST_HOSTS=a:2222,b:2222", "TFDIST_NODE_RANK=0"),
    "ENV003_spaces": ("TFDIST_HOSTS=a b", "TFDIST_NODE_RANK=0"),
    "ENV004_nobody_else": ("TFDIST_STRATEGY=ps",),
    "ENV005_private_key": ("SIGNING_PRIVATE_KEY=not-a-real-key",),
    "ENV005_token": ("TFDIST_TOKEN=not-a-real-token",),
    "ENV006_strategy": (
        "TFDIST_STRATEGY=multiworker",
        "TF_CONFIG=" + json.dumps({"cluster": PS, "task": CHIEF_0, "tfdist": {"strategy": "ps"}}),
    ),
    "ENV006_three_hosts": (f"TF_CONFIG={GOOD}", "TFDIST_HOSTS=a,b,c", "TFDIST_NODE_RANK=0"),
    "ENV007_rank": ("TFDIST_HOSTS=a,b", "TFDIST_NODE_RANK=2"),
    "ENV007_slurm": (
        *("SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS=3"),
        *("SLURM_STEP_TASKS_PER_NODE=2", "SLURM_STEP_NODELIST=n[1-2]"),
    ),
    "ENV008_none_in_capitals": (*HOSTS, "http_proxy=http://p:1", "NO_PROXY=a,b"),
    "ENV008_proxy": (f"TF_CONFIG={GOOD}", "https_proxy=http://proxy.example:3128"),
    "ENV010_keras": (f"TF_CONFIG={GOOD}", "TF_USE_LEGACY_KERAS=True"),
}

# The lines of get_config() between `config = base()` and its end.
OF_CONFIG = {
    "CFG001_syntax": ('config.dataset = "mnist',),
    "CFG003_batchsize": ("config.global_batchsize = 128",),
    "CFG003_update": ("config.update(learning_rte=0.1)",),
    "CFG004_text": ('config.global_batch_size = "128"',),
    "CFG005_modle": ('config.model = "resnet-20"',),
    "CFG006_zero": ("config.learning_rate = 0.0",),
    "CFG009_checkpoints": ("config.total_examples = 100", "config.checkpoints = 101"),
    "CFG010_warmup": ("config.warmup_examples = config.total_examples",),
    "CFG011_nan": ('config.augmentation.std = (float("nan"),)',),
    "CFG011_text": ('config.augmentation.mean = ("0.5",)',),
    "CFG012_backwards": ("config.profile_steps = (120, 100)",),
    "CFG013_no_split": ('config.validation_split = ""', "config.early_stopping_patience = 3"),
    "CFG014_devices": ("config.devices_per_worker = 8", "config.global_batch_size = 4"),
    "CFG015_resnet": ('config.strategy = "ps"', 'config.model = "resnet20"'),
    "CFG020_same_split": ('config.validation_split = "train"',),
    "CFG021_single": ('config.strategy = "single"', "config.devices_per_worker = 2"),
    "CFG025_mirrored": ('config.strategy = "mirrored"', "config.sharded_optimizer = True"),
    "CFG024_raises": ('config.checkpoints = int("ten")',),
}
BASE = "from tfdist.configs import base\n\n\n"
OF_PROGRAM = {
    "CFG002_main": BASE + "def config():\n    return base()\n",
    "CFG007_empty": "from ml_collections import ConfigDict\n\n\n"
    'def get_config():\n    return ConfigDict({"dataset": "mnist"})\n',
    "CFG008_dict": 'def get_config():\n    return {"dataset": "mnist"}\n',
    "CFG008_no_return": BASE + "def get_config():\n    config = base()\n",
}

LISTED = '{name: TFDIST_HOSTS, value: "mnist-[0-3].train"}\n'
OWN_TF_CONFIG = f"{{name: TF_CONFIG, value: '{GOOD}'}}\n"
POLICY = """\
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes: {operator: In, values: [2]}
"""
SERVICE = (HERE / "good_indexed_job.yaml").read_text().partition("apiVersion: batch/v1")[0]

# What is in good_indexed_job.yaml, and what is there in its place.
OF_JOB = {
    "CFG003_in_a_manifest": ("global_batch_size", "global_batchsize"),
    "ENV003_in_a_manifest": ("mnist-[0-3].train", "mnist-[3-0].train"),
    "K8S010_misspelt": ("completionMode", "completionmode"),
    "K8S010_not_indexed": ("  completionMode: Indexed\n", ""),
    "K8S011_default": ("  parallelism: 4\n", ""),
    "K8S011_two_at_a_time": ("parallelism: 4", "parallelism: 2"),
    "K8S012_no_subdomain": ("      subdomain: train\n", ""),
    "K8S013_other_subdomain": ("mnist-[0-3].train", "mnist-[0-3].training"),
    "K8S014_eight_hosts": ("mnist-[0-3].train", "mnist-[0-7].train"),
    "K8S014_slots": ("mnist-[0-3].train", "mnist-[0-3].train:2"),
    "K8S015_from_1": ("mnist-[0-3].train", "mnist-[1-4].train"),
    "K8S015_other_name": ("mnist-[0-3].train", "minst-[0-3].train"),
    "K8S016_no_hosts": (f"          env:\n            - {LISTED}", ""),
    "K8S018_no_service": (SERVICE, ""),
    "K8S019_cluster_ip": ("  clusterIP: None\n", ""),
    "K8S024_no_policy": (POLICY, ""),
    "K8S025_143": ("values: [2]", "values: [2, 143]"),
    "K8S025_not_in": ("operator: In, values: [2]", "operator: NotIn, values: [0, 1]"),
    "K8S026_five_seconds": ("PeriodSeconds: 120", "PeriodSeconds: 5"),
    "K8S035_tf_config": (LISTED, OWN_TF_CONFIG),
}
# Variables more in its container.
OF_VARIABLES = {
    "ENV001_in_a_manifest": {"TFDIST_STRATEGY": "parameter_server"},
    "ENV004_mirrored": {"TFDIST_STRATEGY": "mirrored"},
    "ENV001_stages_in_a_manifest": {"TFDIST_STAGES": "2"},
    "ENV004_ps": {"TFDIST_PS": "3"},
    "ENV005_in_a_manifest": {"DATA_PASSWORD": "not-a-real-one"},
    "ENV008_in_a_manifest": {"http_proxy": "http://proxy.example:3128"},
    "K8S035_rank": {"TFDIST_NODE_RANK": "0"},
}
# The command in good_launcher_in_a_pod.yaml.
OF_COMMAND = {
    "CFG014_in_a_manifest": "tfdist.launch, --workers=8, --config.global_batch_size=4",
    "LCH001_in_a_manifest": "tfdist.launch, --workers=4, --split_bytes=4000000, train.py",
    "LCH002_in_a_manifest": "tfdist.launch, --wrokers=4, train.py",
}


def changed(name: str, old: str, new: str) -> str:
    """A good file in which something is another."""
    text = (HERE / name).read_text()
    assert old in text, (name, old)
    return text.replace(old, new)


def _texts() -> Iterator[tuple[str, str]]:
    for name, fields in OF_TF_CONFIG.items():
        yield f"{name}.json", json.dumps(fields)
    for name, address in OF_ADDRESS.items():
        cluster = {"worker": [address, "b.example:2222"]}
        yield f"{name}.json", json.dumps({"cluster": cluster, "task": WORKER_0})
    for name, (listed, options) in OF_OPTIONS.items():
        task = {"type": next(iter(listed)), "index": 0}
        yield f"{name}.json", json.dumps({"cluster": listed, "task": task, "tfdist": options})
    for name, variables in OF_ENVIRON.items():
        yield f"{name}.env", "\n".join([*variables, ""])
    for name, lines in OF_CONFIG.items():
        body = "".join(f"    {line}\n" for line in ("config = base()", *lines, "return config"))
        yield f"{name}.py", f"{BASE}def get_config():\n{body}"
    yield from ((f"{name}.py", text) for name, text in OF_PROGRAM.items())
    yield from _manifests()


def _manifests() -> Iterator[tuple[str, str]]:
    for name, (old, new) in OF_JOB.items():
        yield f"{name}.yaml", changed("good_indexed_job.yaml", old, new)
    for name, variables in OF_VARIABLES.items():
        more = (
            f'            - {{name: {n}, value: "{value}"}}\n' for n, value in variables.items()
        )
        text = changed("good_indexed_job.yaml", LISTED, "".join([LISTED, *more]))
        yield f"{name}.yaml", text
    command = next(
        line
        for line in (HERE / "good_launcher_in_a_pod.yaml").read_text().splitlines()
        if "command:" in line
    )
    for name, words in OF_COMMAND.items():
        own = f"          command: [python, -m, {words}]"
        yield f"{name}.yaml", changed("good_launcher_in_a_pod.yaml", command, own)
    no_port = f"{{name: TF_CONFIG, value: '{GOOD.replace('a.example:2222', 'a.example')}'}}"
    run_dir = "{name: TFDIST_RUN_DIR, value: /runs/mnist}"
    yield "TFC010_in_a_manifest.yaml", changed("good_launcher_in_a_pod.yaml", run_dir, no_port)
    reasons = "        onJobFailureReasons: [PodFailurePolicy]\n"
    rules = f"    rules:\n      - action: FailJobSet\n{reasons}"
    yield "K8S024_job_set.yaml", changed("good_job_set.yaml", rules, "")
    yield "K8S014_job_set.yaml", changed("good_job_set.yaml", "worker-0-[0-2]", "worker-0-[0-4]")
    first = "              command: [python, -m, tfdist.train]\n    Worker:"
    env = '              env: [{name: TFDIST_HOSTS, value: "mnist-worker-[0-1]"}]\n    Worker:'
    more = first.replace("    Worker:", env)
    yield "K8S034_tf_config.yaml", changed("good_tf_job.yaml", first, more)


BROKEN = {**OF_TEXT, **{name: text.encode() for name, text in _texts()}}
"""The files, by their names."""
