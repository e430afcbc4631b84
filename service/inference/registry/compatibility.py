"""Differences between two versions of a model that would break its clients without an error."""

from models.manifest import Manifest
from service.inference.errors import InvalidInput


def check_replacement(served: Manifest, new: Manifest) -> None:
    """Check that a new version of a model can take the place of the served one.

    Raises:
        InvalidInput: They differ in what clients rely on; the message has both values.
    """
    if differences := incompatibilities(served, new):
        raise InvalidInput(
            f"the new version has {', '.join(differences)} of the served version, on which clients "
            "and their indexes rely; allow_incompatible in POST /models/{name} serves it",
            code="incompatible",
            pointer="/path",
        )


def incompatibilities(old: Manifest, new: Manifest) -> list[str]:
    """Return the differences that would break clients, each as a phrase with both values.

    Indexes have vectors of the old width and compare them by the old similarity. Thresholds are for
    scores after the old activation, and labels are compared by name. An old index is searched by
    the name of its model's space. Further outputs and spaces break nothing.
    """
    differences = []
    if old.outputs[0] != new.outputs[0] or not {*old.outputs} <= {*new.outputs}:
        outputs = (", ".join(version.outputs) for version in (new, old))
        differences.append("the outputs {} in place of {}".format(*outputs))
    differences += [
        f"the {name} {getattr(new, name) or 'none'} in place of {getattr(old, name) or 'none'}"
        for name in ("width", "similarity", "activation")
        if getattr(old, name) != getattr(new, name)
    ]
    for name, version in old.spaces.items():
        if new.spaces.get(name) != version:
            other = new.spaces.get(name, "")[:12] or "none"
            differences.append(f"the model {other} in place of {version[:12]} as space {name}")
    if len(old.labels) != len(new.labels):
        differences.append(f"{len(new.labels)} labels in place of {len(old.labels)}")
    elif old.labels != new.labels:
        pairs = zip(old.labels, new.labels, strict=True)
        before, after = next((a, b) for a, b in pairs if a != b)
        differences.append(f"the label {after!r} in place of {before!r}")
    return differences
