"""A key that names another config file: it is read too where it exists."""

from pathlib import Path

from shoal.convert.configs.rules import Key, Rule

FOLDERS_ABOVE = 4


def linked(what: str) -> Rule:
    """`what` is the kind of file that the key names."""

    def translate(key: Key) -> None:
        if isinstance(key.value, dict):
            key.not_carried("is not the path of a file")
            return
        if follow(key):
            return
        key.not_carried(f"names {what}, which is not there: give it as another FILE")

    return Rule(translate, says=f"{what} is read too, if it is there; or give it as another FILE")


def follow(key: Key) -> bool:
    """Read the file that `key` names, unless it was given."""
    name = Path(str(key.value)).name
    if name in key.draft.named:
        key.no_meaning("that file is translated too")
        return True
    path = find_file(key, str(key.value))
    if path is None:
        return False
    key.draft.queue.append(path)
    key.draft.named.add(name)
    key.no_meaning(f"{name} is translated too")
    return True


def find_file(key: Key, name: str) -> Path | None:
    """A file that `key` names: in the folder of its source, or in one above, because systems are often started in the
    root of a repository."""
    folder = Path(key.source.folder)
    above = folder.resolve().parents[:FOLDERS_ABOVE]
    return next((base / name for base in (folder, *above) if (base / name).is_file()), None)
