"""A key that names another config file: it is read too where it exists."""

from pathlib import Path

from shoal.convert.configs.rules import Key, Rule


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
    path = Path(key.source.folder) / str(key.value)
    if path.name in key.draft.named:
        key.no_meaning("that file is translated too")
        return True
    if not path.is_file():
        return False
    key.draft.queue.append(path)
    key.draft.named.add(path.name)
    key.no_meaning(f"{path.name} is translated too")
    return True
