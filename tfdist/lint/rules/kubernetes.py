"""Rules for Kubernetes manifests: Job, JobSet, StatefulSet, TFJob and what stands beside them."""

from __future__ import annotations

from tfdist.lint.rules.table import error, warning

RULES = (
    error(
        "K8S001",
        "a manifest that is not YAML",
        reason="kubectl refuses it as a whole.",
    ),
    error(
        "K8S002",
        "a key twice in one mapping",
        reason="The last one counts, and the other, often a copy of another container's, is lost.",
    ),
    error(
        "K8S003",
        "a kind under the wrong apiVersion",
        reason="The API server knows a kind only in its own group and version.",
    ),
    error(
        "K8S004",
        "a kind with a misspelt name",
        reason="Kinds are written exactly: TFJob, JobSet, StatefulSet.",
    ),
    error(
        "K8S005",
        "a workload without a name that its pods can have",
        reason="Pods and TFDIST_HOSTS have the name; it is a DNS label of at most 63 characters.",
    ),
    error(
        "K8S006",
        "a misspelt field",
        reason="The API server drops a field that it does not know, or refuses the manifest.",
    ),
    error(
        "K8S007",
        "a field of the wrong type",
        reason="Numbers are not strings in a manifest, and a mapping is not a list.",
    ),
    error(
        "K8S008",
        "a variable whose value is not a string",
        reason="Values of env are strings: 2 and true need quotes.",
    ),
    error(
        "K8S009",
        "a workload without a container or an image",
        reason="There is nothing to run.",
    ),
    error(
        "K8S010",
        "a Job of several pods that is not Indexed",
        reason="Its pods have random names, and cannot find themselves in TFDIST_HOSTS.",
    ),
    error(
        "K8S011",
        "fewer pods at a time than tasks",
        reason="The first tasks wait for the others, which wait for the first to end.",
    ),
    error(
        "K8S012",
        "pods without a subdomain",
        reason="A pod has a name in DNS only below its subdomain or serviceName.",
    ),
    error(
        "K8S013",
        "TFDIST_HOSTS under another subdomain than the pods'",
        reason="The names do not resolve, and the tasks wait in vain.",
    ),
    error(
        "K8S014",
        "TFDIST_HOSTS with another number of pods than the workload",
        reason="Tasks wait for pods that are never made, or pods are not in the list.",
    ),
    error(
        "K8S015",
        "TFDIST_HOSTS with names that the pods do not have",
        reason="A pod finds itself in the list by its host name.",
    ),
    error(
        "K8S016",
        "several pods and no TFDIST_HOSTS",
        reason="Each pod would train by itself, and all would write the same files.",
    ),
    error(
        "K8S017",
        "several tasks in one pod",
        reason="A pod of TFDIST_HOSTS is one task.",
    ),
    warning(
        "K8S018",
        "no Service for the pods' names",
        reason="Without a headless Service of the subdomain's name DNS has no pod of it.",
    ),
    error(
        "K8S019",
        "a Service that is not headless",
        reason="It has one address for all pods; only clusterIP: None names each of them.",
    ),
    error(
        "K8S020",
        "a Service that selects other pods",
        reason="Pods without the selector's labels get no name from it.",
    ),
    warning(
        "K8S021",
        "pods that are named only when they are ready",
        reason="With a readinessProbe a task may become ready after the others, which look for it.",
    ),
    error(
        "K8S022",
        "a restart policy that this kind does not take",
        reason="A Job's pods have Never or OnFailure, a StatefulSet's Always, TFJob also ExitCode.",
    ),
    error(
        "K8S023",
        "podFailurePolicy without restartPolicy: Never",
        reason="The API server refuses it: containers restarted in place are not failed pods.",
    ),
    warning(
        "K8S024",
        "a usage error that is tried again",
        reason="Exit code 2 is the same at every try; FailJob on it, or backoffLimit: 0, says so.",
    ),
    warning(
        "K8S025",
        "a job given up for a code that means: again",
        reason="75 (a peer is missing), 130 and 143 (state saved) are worth another start.",
    ),
    warning(
        "K8S026",
        "too little time to save",
        reason="After SIGTERM a task saves; less than 30 s may end it before it has.",
    ),
    warning(
        "K8S027",
        "pods on the host's network",
        reason="TensorFlow's servers run what anyone sends, and listen on every interface.",
    ),
    warning(
        "K8S028",
        "no NetworkPolicy for the pods",
        reason="TensorFlow's servers run what anyone sends: admit the job's own pods only.",
    ),
    warning(
        "K8S029",
        "an image that may be another one tomorrow",
        reason="Pods that start at different times can have different versions under one tag.",
    ),
    error(
        "K8S030",
        "GPUs in requests that limits do not have",
        reason="An extended resource has equal requests and limits, or the pod is refused.",
    ),
    error(
        "K8S031",
        "a TFJob's container that is not called tensorflow",
        reason="The operator sets TF_CONFIG in the container of this name only.",
    ),
    error(
        "K8S032",
        "an unknown type of replica in a TFJob",
        reason="The types are Chief, Master, Worker, PS and Evaluator.",
    ),
    error(
        "K8S033",
        "replicas of a TFJob that make no job",
        reason="ps need a chief and a worker, and there is one chief and one evaluator at most.",
    ),
    error(
        "K8S034",
        "variables in a TFJob that its operator sets",
        reason="The operator writes TF_CONFIG for each pod; another source contradicts it.",
    ),
    error(
        "K8S035",
        "one pod's variables in all pods",
        reason="TF_CONFIG and TFDIST_NODE_RANK say which task this is: all pods would be the same.",
    ),
    error(
        "K8S036",
        "pods of a JobSet without names",
        reason="enableDNSHostnames: false leaves them out of DNS.",
    ),
    warning(
        "K8S037",
        "pods of a StatefulSet that start one by one",
        reason="Tasks start together; OrderedReady waits for each to be ready before the next.",
    ),
    error(
        "K8S038",
        "a StatefulSet that selects other pods than its own",
        reason="The API server refuses a selector that the template's labels do not match.",
    ),
    error(
        "K8S039",
        "variables that differ between the parts of a job",
        reason="All tasks work out the same cluster from the same TFDIST_ values.",
    ),
    error(
        "K8S040",
        "a NetworkPolicy that keeps the job's pods from each other",
        reason="A pod that a policy selects hears, and reaches, only whom a policy has for it.",
    ),
    error(
        "K8S041",
        "a NetworkPolicy that keeps the pods from DNS",
        reason="Tasks find each other by names, and DNS is in another namespace, at port 53.",
    ),
    error(
        "K8S042",
        "a toleration that the API server refuses",
        reason="Effects, operators, values and seconds go together in few ways only.",
    ),
    error(
        "K8S043",
        "a setting in a securityContext of the wrong level",
        reason="Some are the pod's, some the container's; elsewhere they are dropped or refused.",
    ),
    error(
        "K8S044",
        "a securityContext that contradicts itself",
        reason="The API server refuses it, or no node starts the container.",
    ),
)
