"""The flags that only pods have: from their texts to `tfdist.schedulers.pods`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfdist.errors import UsageError, near
from tfdist.schedulers.flags import Given
from tfdist.schedulers.pods import OWN_LABELS, PodOptions, Toleration, User
from tfdist.schedulers.request import Volume

_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_MAX_ID = 2**31 - 1
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII)
_SOURCE = re.compile(r"/[^\0:]*|[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9_./-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_TAINT = re.compile(rf"({_KEY})(?:=({_VALUE})?)?(?::(\w+))?")
_USER = re.compile("([0-9]{1,10})(?::([0-9]{1,10}))?")


def pod_options(given: Given) -> PodOptions:
    """Returns what the flags of pods say.

    Raises:
        UsageError: there is no image, or a value that Kubernetes would not take.
    """
    return PodOptions(
        image=_image(given.one("image")),
        namespace=_name(given, "namespace"),
        node_selector=_labels(given, "node_selector", example="disk=ssd"),
        volumes=volumes(given),
        service_account=_name(given, "service_account"),
        image_pull_secret=_name(given, "image_pull_secret"),
        tolerations=tuple(_toleration(text) for text in given.all("toleration")),
        priority_class=_name(given, "priority_class"),
        user=_user(given.one("run_as_user")),
        labels=_labels(given, "label", example="team=vision", without=OWN_LABELS),
    )


def volumes(given: Given) -> tuple[Volume, ...]:
    """Returns every --volume."""
    return tuple(_volume(text) for text in given.all("volume"))


def _image(image: str | None) -> str:
    if not image or not _IMAGE.fullmatch(image):
        fix = "write --image registry/name:tag"
        expected = "the image of the pods, with tfdist in it"
        received = repr(image) if image else "nothing"
        raise UsageError("--image", received=received, expected=expected, fix=fix)
    return image


def _name(given: Given, flag: str) -> str | None:
    name = given.one(flag)
    if name is not None and not _NAME.fullmatch(name):
        fix, expected = "correct it", "the name of an object of Kubernetes"
        raise UsageError(f"--{flag}", received=repr(name), expected=expected, fix=fix)
    return name


def _labels(
    given: Given, flag: str, *, example: str, without: tuple[str, ...] = ()
) -> Mapping[str, str]:
    labels = given.pairs(flag)
    for key, value in labels.items():
        if re.fullmatch(_KEY, key) and re.fullmatch(f"({_VALUE})?", value) and key not in without:
            continue
        others = f", none of {', '.join(without)}" if without else ""
        fix, expected = f"write --{flag} {example}", f"a label and its value{others}"
        raise UsageError(f"--{flag}", received=repr(f"{key}={value}"), expected=expected, fix=fix)
    return labels


def _toleration(text: str) -> Toleration:
    """Returns the taint that ``kubectl taint`` writes so, or its key alone."""
    taint = _TAINT.fullmatch(text)
    if taint is None or taint[3] not in (None, *_EFFECTS):
        effect = text.rpartition(":")[2]
        fix = f"write --toleration gpu=yes:NoSchedule{near(effect, _EFFECTS)}"
        expected = f"KEY, KEY:EFFECT or KEY=VALUE:EFFECT, EFFECT being {' or '.join(_EFFECTS)}"
        raise UsageError("--toleration", received=repr(text), expected=expected, fix=fix)
    value = (taint[2] or "") if "=" in text else None
    return Toleration(key=taint[1], value=value, effect=taint[3])


def _user(text: str | None) -> User | None:
    if text is None:
        return None
    ids = _USER.fullmatch(text)
    uid, gid = (int(ids[1]), int(ids[2] or 0)) if ids else (-1, -1)
    if not (0 <= uid <= _MAX_ID and 0 <= gid <= _MAX_ID):
        fix = "write --run_as_user 1000, or 1000:1000"
        expected = f"the number of a user, or of a user and a group, up to {_MAX_ID}"
        raise UsageError("--run_as_user", received=repr(text), expected=expected, fix=fix)
    return User(uid=uid, gid=gid if ":" in text else None)


def _volume(text: str) -> Volume:
    source, _, rest = text.partition("=")
    mount, _, mode = rest.partition(":")
    is_right = _SOURCE.fullmatch(source) and re.fullmatch("/[^:]+", mount)
    if not is_right or mode not in ("", "ro"):
        fix = "write --volume data=/data, or --volume data=/data:ro"
        expected = "CLAIM=/PATH or /DIRECTORY=/PATH, and :ro to read only"
        raise UsageError("--volume", received=repr(text), expected=expected, fix=fix)
    return Volume(source=source, mount=mount, read_only=mode == "ro")
