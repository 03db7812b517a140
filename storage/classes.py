"""Say which classes a list of images has, before anything is scored by them."""

from collections import Counter

from storage.image_list import ImageList

SHOWN = 5  # names in a sentence
# Folders of these names hold parts of a data set, or kinds of files.
NO_CLASSES = {"train", "training", "val", "valid", "validation", "test", "testing", "heldout"}
NO_CLASSES |= {"image", "images", "img", "imgs", "mask", "masks", "label", "labels"}


def describe_classes(files: ImageList) -> list[str]:
    """Describe the classes of a list of images -> sentences, for a person.

    The first says how many there are, and some names with their images; the others begin with
    "warning:". ValueError if there are fewer than two classes.
    """
    counts = Counter(files.classes[label] for label in files.labels if label >= 0)
    names = sorted(counts)
    if len(names) < 2:
        raise ValueError(
            f"{files.root} has {len(names)} classes, but a score needs two: "
            "give a folder with one folder of images per class"
        )
    some = [f"{name} ({counts[name]})" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        some.append("...")
    each = f"{len(names)} classes of {min(counts.values())} to {max(counts.values())} images"
    sentences = [f"{files.root}: {each}: {', '.join(some)}"]
    unlikely = sorted(name for name in names if name.lower() in NO_CLASSES)
    if len(unlikely) > 1:
        what = f"{', '.join(unlikely)} do not look like classes"
        sentences.append(f"warning: {files.root}: {what}: give a folder of one")
    return sentences
